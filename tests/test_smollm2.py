"""The real model, end to end: SmolLM2's greedy tokens equal those of transformers on the same dequantised weights."""

import numpy as np
import pytest

from flax_paged.generation.engine import Engine
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.loading import load_model, load_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.smollm2, pytest.mark.filterwarnings("ignore")]

MAX_TOKENS = 20
PROMPTS = [
    "The capital of France is",
    "a",
    "\n",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.zeros((3, 4))\nfor i in range(",
    "SELECT name, age FROM users WHERE",
    "<div class='row'>\n\t<p>Hello</p>\n",
    "2 + 2 = 4, 3 + 3 = 6, 1234567890 + 1 =",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "日本の首都は",
    "Привет, как дела?",
    "🎉🎊 Happy birthday to you 🎂!",
    "   leading and trailing spaces   ",
    "Once upon a time, in a small village by the sea, there lived",
    "The three laws of thermodynamics are:\n1.",
    "Q: What is the boiling point of water at sea level?\nA:",
    "To be, or not to be, that is the question:",
    "<|im_start|>user\nWrite a haiku about snow.<|im_end|>\n<|im_start|>assistant\n",
    "e^{i\\pi} + 1 = 0 is known as",
    "The mitochondria is the powerhouse of the cell. " * 70,  # about 600 tokens
    "Roses are red,\r\nViolets are blue,\r\n",
    "x" * 200,
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2_path, prompts):
    """transformers' greedy continuation of each prompt, and the gap between the best two logits at each token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    results = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
                pad_token_id=2,
            )
        best = [scores[0].topk(2).values for scores in out.scores]
        results.append((out.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in best]))
    return results


@pytest.fixture(scope="module")
def engine(smollm2_path, tokenizer):
    model = load_model(smollm2_path)
    return Engine(
        model, tokenizer, num_pages=256, page_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024
    )


def check(outputs, expected):
    for text, output, (token_ids, gaps) in zip(PROMPTS, outputs, expected, strict=True):
        got = output.outputs[0].token_ids
        if output.outputs[0].finish_reason == "stop" and token_ids[-1:] == [2]:
            token_ids = token_ids[: len(got)]
        same = next((i for i, (a, b) in enumerate(zip(got, token_ids, strict=False)) if a != b), len(token_ids))
        assert same == len(token_ids) or gaps[same] < 1e-3, (text, got, token_ids, gaps[same])


def test_there_are_enough_prompts_of_every_kind(prompts):
    lengths = [len(prompt) for prompt in prompts]
    assert len(prompts) >= 20 and min(lengths) == 1 and max(lengths) >= 600


def test_greedy_tokens_equal_transformers_one_at_a_time(engine, prompts, expected):
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    check([engine.generate([prompt], params)[0] for prompt in prompts], expected)


def test_greedy_tokens_equal_transformers_batched(engine, prompts, expected):
    check(engine.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)), expected)


def test_the_text_begins_as_it_should(engine):
    output = engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=MAX_TOKENS))[0]
    assert output.outputs[0].text.startswith(" Paris.\n\nThe answer is: 2018-01-22")


def test_tokenizer_ids_equal_transformers(smollm2_path, tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    for text in PROMPTS:
        np.testing.assert_array_equal(tokenizer.encode(text), theirs(text).input_ids, err_msg=repr(text))
