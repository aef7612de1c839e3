"""Text from token to token: stop texts across token edges, and nothing of them shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import make, sentencepiece_tokenizer

from flax_paged.generation import answer as answer_module
from flax_paged.generation.answer import Answer
from flax_paged.generation.sampling_params import SamplingParams
from flax_paged.generation.sequence import Sequence


class Pieces:
    """Stands in for the detokenizer: token i is the i-th piece."""

    pieces = ()

    def __init__(self, tokenizer, **options):
        pass

    def add(self, token_id):
        return self.pieces[token_id]

    def finish(self):
        return ""


def speak(pieces, *, eos=None, **params):
    """Run an answer through; returns (its output, the increments joined)."""
    Pieces.pieces = pieces
    answer_module.IncrementalDetokenizer, original = Pieces, answer_module.IncrementalDetokenizer
    try:
        sequence = Sequence(
            "0",
            [0],
            SamplingParams(max_tokens=len(pieces), **params),
            max_num_tokens=1 + len(pieces),
            eos_token_ids=eos or (),
        )
        answer = Answer(sequence, tokenizer=object())
        streamed = ""
        for token_id in range(len(pieces)):
            answer.append(token_id, None)
            streamed += answer.increment().text
            if sequence.finish_reason:
                break
        return answer.output(), streamed
    finally:
        answer_module.IncrementalDetokenizer = original


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "num_tokens", "reason"),
    [
        (["alpha ", "be", "ta ", "gamma", " more"], "beta gamma", "alpha ", 4, "beta gamma"),
        (["alpha b", "eta gam", "ma delta"], "beta gamma", "alpha ", 3, "beta gamma"),
        (["a\n", "\nb"], ["\n\n", "b"], "a", 2, "\n\n"),
        (["ab", "cd"], ["bcd", "c"], "ab", 2, "c"),
        (["ab", "c", "x"], "bcd", "abcx", 3, None),
        (["ab", "c"], "bcd", "abc", 2, None),
        (["aab", "aac"], "aabaac", "", 2, "aabaac"),
        (["xx", "stop"], "stop", "xx", 2, "stop"),
    ],
)
def test_stop_texts(pieces, stop, text, num_tokens, reason):
    output, streamed = speak(pieces, stop=stop)
    assert (output.text, streamed, len(output.token_ids)) == (text, text, num_tokens)
    assert output.stop_reason == reason
    assert output.finish_reason == ("stop" if reason else "length")


def test_stop_text_may_be_kept():
    output, streamed = speak(["one ", "st", "op two"], stop="stop", include_stop_str_in_output=True)
    assert output.text == streamed == "one stop"


def test_stop_token_may_be_kept_and_is_left_out_else():
    for keep, text in ((False, "ab"), (True, "abc")):
        output, streamed = speak(["a", "b", "c", "d"], stop_token_ids=[2], include_stop_str_in_output=keep)
        assert output.text == streamed == text and output.token_ids == [0, 1, 2]


def test_stop_text_counts_only_after_min_tokens():
    output, _ = speak(["x", "stop", "a", "stop", "b"], stop="stop", min_tokens=2)
    assert output.text == "xstopa" and len(output.token_ids) == 4


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=3), min_size=1, max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_streamed_text_is_what_a_whole_search_gives(pieces, stops):
    output, streamed = speak(pieces, stop=stops)
    assert output.text == streamed
    for num_tokens in range(1, len(pieces) + 1):
        text = "".join(pieces[:num_tokens])
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if ends:
            assert output.text == text[: min(ends)[1]] and len(output.token_ids) == num_tokens
            return
    assert output.text == "".join(pieces) and output.finish_reason == "length"


def test_the_space_before_the_first_word_belongs_to_the_answer():
    """SentencePiece drops it at the beginning of a text, which an answer is not: "a" goes on with " ab", not "ab"."""
    tokenizer = make(sentencepiece_tokenizer())
    ids = tokenizer.encode("ab")
    sequence = Sequence("0", [1], SamplingParams(max_tokens=len(ids)), max_num_tokens=1 + len(ids), eos_token_ids=())
    answer = Answer(sequence, tokenizer)
    for token_id in ids:
        answer.append(token_id, None)
    assert answer.output().text == " ab"
