"""Reading data: what is learnt of each form, what cannot be used, and the order of batches."""

import itertools
import json

import jax
import numpy as np
import pytest
import tokenizers

from flax_paged.generation.text import Tokenizer
from flax_paged.training import Example, evaluation_batches, pack_examples, read_examples, training_batches

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}[{{ m.role[0] }}]{{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)


def letters(template=TEMPLATE, adds_bos=True):
    """A token a character, so that ids read as text."""
    pieces = ["<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": adds_bos, "chat_template": template}
    return Tokenizer({"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)})


def read(tmp_path, lines, *, name="data.jsonl", tokenizer=None, max_length=100, **options):
    path = tmp_path / name
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return read_examples(path, tokenizer or letters(), max_length=max_length, **options)


def shown(example, tokenizer=None):
    """All text, and the text that is learnt."""
    tokenizer = tokenizer or letters()
    learnt = example.token_ids[example.weights > 0]
    return tokenizer.decode(example.token_ids.tolist(), False), tokenizer.decode(learnt.tolist(), False)


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_of_a_conversation_only_the_assistants_turns_are_learnt(tmp_path):
    line = chat(("system", "be"), ("user", "hi"), ("assistant", "yo é"), ("user", "x"), ("assistant", "z"))
    (example,), report = read(tmp_path, [line])
    assert shown(example) == ("<s>[s]be</s>\n[u]hi</s>\n[a]yo é</s>\n[u]x</s>\n[a]z</s>\n", "yo é</s>z</s>")
    assert (report.num_examples, report.num_tokens, report.problems) == (1, len(example.token_ids), [])
    # What precedes what is learnt is what the engine is given.
    prompt = letters().apply_chat_template(line["messages"][:2])
    assert example.token_ids.tolist()[: len(prompt)] == prompt


@pytest.mark.parametrize("adds_bos", [True, False])
def test_of_a_prompt_the_completion_is_learnt(tmp_path, adds_bos):
    tokenizer = letters(adds_bos=adds_bos)
    (example,), _ = read(tmp_path, [{"prompt": "2+2=", "completion": "4"}], tokenizer=tokenizer)
    assert shown(example) == ("<s>" * adds_bos + "2+2=4</s>", "4</s>")


def test_text_is_learnt_whole_in_pieces_that_overlap_by_a_token(tmp_path):
    examples, _ = read(tmp_path, [{"text": "abcdefg"}], max_length=4)
    assert [shown(example)[0] for example in examples] == ["<s>abcd", "defg</s>"]
    (file,), report = read(tmp_path, [b"one", b"two"], name="book.txt")
    assert shown(file) == ("<s>one\ntwo\n</s>",) * 2 and report.num_weighted_tokens == len("one\ntwo\n") + 1


GOOD = chat(("user", "a"), ("assistant", "b"))
BAD = {
    "invalid JSON": (b'{"text": ', "invalid JSON: "),
    "not UTF-8": (b'{"text": "\xff"}', "not valid UTF-8: byte 0xff"),
    "unknown form": ({"question": "x"}, "expected 'messages', 'prompt' and 'completion', or 'text', got ['question']"),
    "unknown form 2": ([1], "got a JSON list"),
    "unknown form 3": ({"prompt": "x", "completion": 3}, "expected 'completion' to be text, got 3"),
    "malformed messages": ({"messages": "x"}, "expected 'messages' to be a list of turns"),
    "malformed messages 2": ({"messages": [{"role": "user"}]}, "expected turn 1 to have 'role' and 'content'"),
    "unknown role": (chat(("robot", "x"), ("assistant", "y")), "turn 1 has role 'robot'; expected one of"),
    "no assistant turn": (chat(("user", "x")), "the assistant says nothing"),
    "too long": ({"prompt": "x" * 99, "completion": "y"}, "102 tokens, more than max_length + 1 = 101"),
    "empty text": ({"text": " "}, "the text is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lines_are_named_and_counted(tmp_path, name):
    line, message = BAD[name]
    with pytest.raises(ValueError, match="data.jsonl, line 3: ") as error:
        read(tmp_path, [GOOD, b"", line, GOOD])
    assert message in str(error.value) and "line 2: empty" in str(error.value)
    examples, report = read(tmp_path, [GOOD, b"", line, GOOD], skip_bad=True)
    assert len(examples) == report.num_examples == 2
    kind = name.rstrip(" 23")
    assert report.counts == {"empty line": 1, kind: 1} and f"{kind}: 1" in report.summary()
    assert report.problems[1].startswith(f"{tmp_path / 'data.jsonl'}, line 3: ")


def test_empty_lines_are_counted_and_no_error(tmp_path):
    examples, report = read(tmp_path, [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"  ", GOOD])
    assert len(examples) == 2 and report.counts == {"empty line": 1}


def test_a_template_that_forgets_is_told(tmp_path):
    long = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(ValueError, match="line 1: the chat template renders turn 2 differently"):
        read(tmp_path, [long], tokenizer=letters(FORGETFUL))


def test_files_without_examples(tmp_path):
    with pytest.raises(ValueError, match="nothing to learn"):
        read(tmp_path, [b""])
    with pytest.raises(ValueError, match="line 2: not valid UTF-8"):
        read(tmp_path, [b"one", b"\xffo"], name="book.txt")
    with pytest.raises(ValueError, match="no chat template; use 'prompt' and 'completion'"):
        read(tmp_path, [GOOD], tokenizer=letters(None))


def test_many_problems_are_not_all_printed(tmp_path):
    with pytest.raises(ValueError, match="30 lines not used") as error:
        read(tmp_path, [b"x"] * 30)
    assert "and 10 more" in str(error.value) and "line 21" not in str(error.value)


def examples_of(lengths):
    start = np.cumsum([0, *lengths])
    return [Example(np.arange(a, b, dtype=np.int32), np.ones(b - a, np.float32)) for a, b in itertools.pairwise(start)]


def test_packing_loses_nothing():
    lengths = np.random.default_rng(0).integers(2, 30, 200).tolist()
    rows = pack_examples(examples_of(lengths), 31)
    assert rows.weights.sum() == sum(lengths) - 200 and (rows.segment_ids > 0).mean() > 0.9
    np.testing.assert_array_equal((rows.targets - rows.tokens)[rows.segment_ids > 0], 1)
    firsts = rows.tokens[(rows.positions == 0) & (rows.segment_ids > 0)]
    assert sorted(firsts) == np.cumsum([0, *lengths])[:-1].tolist()


def test_packing_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"examples\[1\] has 12 tokens; expected 2 to max_length \+ 1 = 11"):
        pack_examples(examples_of([3, 12]), 10)
    with pytest.raises(ValueError, match="There are no examples"):
        pack_examples([], 10)


def test_batches_depend_on_the_step_alone_and_no_row_is_dropped():
    rows = pack_examples(examples_of([9] * 7), 8)
    batches = training_batches(rows, 3, seed=1)
    first = [batches[i].tokens[:, 0].tolist() for i in range(7)]
    seen = list(itertools.chain(*first))
    assert sorted(seen[:7]) == sorted(seen[7:14]) == sorted(seen[14:]) == rows.tokens[:, 0].tolist()
    assert seen[:7] != seen[7:14]
    again = training_batches(rows, 3, seed=1)
    assert [again[i].tokens[:, 0].tolist() for i in (6, 2)] == [first[6], first[2]]
    assert training_batches(rows, 3, seed=2)[0].tokens[:, 0].tolist() != first[0]
    whole = list(evaluation_batches(rows, 3))
    assert [batch.tokens.shape for batch in whole] == [(3, 8)] * 3
    assert sum(batch.weights.sum() for batch in whole) == rows.weights.sum()
    assert jax.tree.leaves(whole[2])[2][1:].sum() == 0
