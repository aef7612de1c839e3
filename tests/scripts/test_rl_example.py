"""scripts/rl_example.py: the reward rises, and engine and training agree on the probabilities."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "scripts" / "rl_example.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("rl_example_script", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_reward_rises_and_log_probabilities_agree(script, checkpoint, capsys):
    options = ["--iterations", "20", "--group", "8", "--max-tokens", "8", "--learning-rate", "0.01"]
    assert script.main(["--model", str(checkpoint), "--prompts", "Hello", "a b", "What", *options]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rewards = [report["mean_reward"] for report in reports]
    assert len(rewards) == 20 and np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3, rewards
    assert max(report["max_logprob_gap"] for report in reports) < 1e-4


def test_advantages(script):
    rewards = np.array([[0.0, 1.0], [0.5, 0.5]], np.float32)
    np.testing.assert_allclose(script.advantages_of(rewards), [[-1, 1], [0, 0]], atol=1e-5)
    assert script.digit_fraction("a1 2") == 0.5 and script.digit_fraction("") == 0


def test_a_group_of_one_is_refused(script, checkpoint, capsys):
    assert script.main(["--model", str(checkpoint), "--group", "1"]) == 2
    assert "expected at least 2 answers" in capsys.readouterr().err
