import json

import pytest
import tokenizers
from flax import nnx

from flax_paged import load_tokenizer, save_model
from flax_paged.models.llama import Llama, LlamaConfig


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small random Llama with a letter tokenizer and a chat template, in our Orbax folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {"<s>": 0, **{chr(31 + i): i for i in range(2, 95)}, "Ġ": 1, "</s>": 95}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = Llama(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.5,
        ),
        rngs=nnx.Rngs(0),
    )
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_model(model, path, load_tokenizer(folder))
    return path
