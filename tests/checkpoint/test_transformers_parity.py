"""Loading and tokenizing beside Hugging Face transformers."""

import json

import numpy as np
import pytest
from checkpoint_files import CORPUS, DIGIT_TEXTS, SPECIAL, TEXTS, byte_level_tokenizer

from flax_paged.loading import load_model, load_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

MESSAGES = [
    [{"role": "user", "content": "Hello <b>world</b> & 'you'"}],
    [
        {"role": "system", "content": "Be  brief.\n"},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "한국 😀"},
    ],
]
TEMPLATES = [
    "{% for m in messages %}\n    {{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{{- bos_token }}{%- for m in messages %}{% if loop.index0 == 3 %}{% break %}{% endif %}"
    "{{- m | tojson }}{% generation %}{{ m.content | trim }}{% endgeneration %}{%- endfor %}{{ eos_token }}",
]


def tiny_llama(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | heads | changes)).eval()


@pytest.mark.parametrize(
    ("dtype", "shard", "changes"),
    [
        ("float32", "5GB", {}),
        ("float32", "40KB", {"tie_word_embeddings": True}),
        ("float32", "40KB", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
        ("bfloat16", "20KB", {}),
        ("float16", "5GB", {"tie_word_embeddings": True}),
    ],
)
def test_folders_that_transformers_writes(tmp_path, dtype, shard, changes):
    theirs = tiny_llama(**changes).to(getattr(torch, dtype))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert ((tmp_path / "model.safetensors.index.json").exists()) == (shard != "5GB")
    ours = load_model(tmp_path)
    assert ours.embed_tokens.weight.dtype == np.dtype(ours.norm.weight.dtype)
    assert str(ours.embed_tokens.weight.dtype) == dtype
    theirs = theirs.float()
    tokens = np.random.default_rng(0).integers(0, 64, (2, 17))
    expected = theirs(torch.tensor(tokens)).logits.detach().numpy()
    logits = load_model(tmp_path, dtype="float32")(tokens.astype(np.int32))
    assert np.abs(np.asarray(logits) - expected).max() < 2e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("adds_bos", [False, True])
def test_tokenizer_folders_that_transformers_writes(tmp_path, adds_bos):
    backend = byte_level_tokenizer()
    if adds_bos:
        from tokenizers import processors

        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", additional_special_tokens=["<tool>"]
    )
    theirs.add_tokens(["<think>"])
    for template in TEMPLATES:
        theirs.chat_template = template
        theirs.save_pretrained(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = load_tokenizer(tmp_path)
        for text in [*TEXTS, *DIGIT_TEXTS, *CORPUS, "a<think>b<tool>c"]:
            ids = theirs(text).input_ids
            assert ours.encode(text) == ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
        for messages in MESSAGES:
            for prompt in (False, True):
                options = {"add_generation_prompt": prompt, "tokenize": False}
                text = theirs.apply_chat_template(messages, **options)
                assert ours.apply_chat_template(messages, **options) == text
                ids = ours.apply_chat_template(messages, add_generation_prompt=prompt)
                expected = theirs(text, add_special_tokens=False).input_ids
                # Where the template forgets the BOS that the tokenizer adds, we add it and transformers does not.
                forgotten = adds_bos and "bos_token" not in template
                assert ids == ([1] if forgotten and expected[0] != 1 else []) + expected
        assert ours.bos_token_id == theirs.bos_token_id and ours.eos_token_ids == (theirs.eos_token_id,)
        assert ours.vocab_size == len(theirs)


def test_a_gguf_tokenizer_equals_transformers_own_conversion(tmp_path):
    gguf = pytest.importorskip("gguf")
    backend = byte_level_tokenizer()
    model = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{key}")(8)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = load_tokenizer(tmp_path / "m.gguf")
    for text in [*TEXTS, *DIGIT_TEXTS, *CORPUS]:
        assert ours.encode(text) == theirs(text).input_ids, text


@pytest.mark.smollm2
def test_smollm2_ids_equal_transformers(smollm2_path):
    # transformers leaves out the digit splitting of tokenizer.ggml.pre, so digits are compared elsewhere.
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    ours = load_tokenizer(smollm2_path)
    for text in [text for text in [*TEXTS, *CORPUS] if not any(character.isnumeric() for character in text)]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for messages in MESSAGES:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.apply_chat_template(messages, tokenize=False) == text
