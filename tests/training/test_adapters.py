"""LoRA: what is trained, merged, stacked and stored; PEFT is the oracle for its own files."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "llama"))
from llama_tools import call, flat_arrays, random_llama, tiny_config, tokens_of

from flax_paged import Engine, SamplingParams, save_model
from flax_paged.nn import LoRA, StackedLoRA
from flax_paged.training import (
    DEFAULT_TARGETS,
    Example,
    TrainStep,
    add_lora,
    has_lora,
    load_adapter,
    lora_of,
    merge_lora,
    pad_examples,
    read_adapter,
    remove_lora,
    save_adapter,
    stack_lora,
)

TOKENS = tokens_of(12)[None]
ENGINE = {"num_pages": 32, "page_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 32}


def adapted(seed=0, **options):
    """A model whose adapter is far from zero."""
    model = add_lora(random_llama(tiny_config()), **{"rank": 3, **options}, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    for lora in lora_of(model).values():
        lora.b[...] = jnp.asarray(rng.normal(0, 0.2, lora.b.shape), lora.b.dtype)
    return model


def logits(model):
    return call(model, TOKENS)


def test_a_fresh_adapter_changes_nothing_and_adds_only_lora_params():
    model = random_llama(tiny_config())
    before, names = logits(model), set(flat_arrays(model))
    assert not has_lora(model)
    add_lora(model, rank=4, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(logits(model), before)
    added = {name: array for name, array in flat_arrays(model).items() if name not in names}
    assert names <= set(flat_arrays(model)) and len(added) == 2 * 2 * len(DEFAULT_TARGETS)
    assert all(name.endswith((".lora.a", ".lora.b")) for name in added)
    assert added["layers.1.mlp.down_proj.lora.a"].shape == (4, 80)
    assert added["layers.1.mlp.down_proj.lora.b"].shape == (48, 4)


def test_only_the_adapter_is_trained():
    model = adapted(targets=["q_proj", "v_proj"])
    before = flat_arrays(model)
    step = TrainStep(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam))
    step(pad_examples([Example(TOKENS[0], np.ones(12, np.float32))], 12))
    for name, array in flat_arrays(model).items():
        assert (".lora." in name) == bool(np.abs(array - before[name]).max() > 0), name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_merged_is_unmerged(dtype):
    model = adapted(alpha=5.0)
    exact = flat_arrays(model)
    unmerged = logits(model)
    assert np.abs(unmerged - logits(random_llama(tiny_config()))).max() > 0.5
    if dtype == jnp.float32:
        np.testing.assert_allclose(logits(merge_lora(model)), unmerged, atol=1e-4, rtol=0)
        assert not has_lora(model) and set(flat_arrays(model)) == set(flat_arrays(random_llama(tiny_config())))
        return
    # The sum of a 16-bit weight and its adapter is rounded once.
    model = random_llama(tiny_config(), dtype=dtype)
    layer = model.layers[0].mlp.up_proj
    layer.lora = LoRA(48, 80, rank=3, alpha=5.0, rngs=nnx.Rngs(0))
    layer.lora.a[...], layer.lora.b[...] = (exact[f"layers.0.mlp.up_proj.lora.{name}"] for name in "ab")
    wide = np.asarray(layer.weight[...], np.float64) + np.float64(5 / 3) * (
        np.asarray(layer.lora.b[...], np.float64) @ np.asarray(layer.lora.a[...], np.float64)
    )
    merge_lora(model)
    assert layer.weight.dtype == dtype
    np.testing.assert_array_equal(layer.weight[...], wide.astype(np.float32).astype(dtype))


def test_remove():
    model = remove_lora(adapted())
    np.testing.assert_array_equal(logits(model), logits(random_llama(tiny_config())))
    remove_lora(model)  # nothing to remove


def test_mistakes():
    model = adapted(targets=["q_proj"])
    with pytest.raises(ValueError, match="layers.0.self_attn.q_proj has an adapter already"):
        add_lora(model, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no linear map 'query' to adapt; expected some of"):
        add_lora(model, targets=["query"], rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rank=0"):
        add_lora(remove_lora(model), rank=0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Llama has no adapters"):
        merge_lora(model)
    with pytest.raises(ValueError, match="expected at least one"):
        stack_lora(model, [])
    with pytest.raises(ValueError, match="expected adapters of one size"):
        StackedLoRA([LoRA(4, 5, rank=1, alpha=1, rngs=nnx.Rngs(0)), LoRA(4, 6, rank=1, alpha=1, rngs=nnx.Rngs(0))])


def is_greedy(model, prompt, answer):
    """Whether an answer is what the dense form finds most likely, token by token."""
    best = call(model, np.array([prompt + answer], np.int32))[0].argmax(axis=-1)
    return best[len(prompt) - 1 : -1].tolist() == answer


def test_the_engine_serves_an_adapter_that_is_not_merged():
    model, prompt = adapted(), TOKENS[0].tolist()
    params = SamplingParams(temperature=0, max_tokens=8)
    answer = Engine(model, **ENGINE).generate([prompt], params)[0].outputs[0].token_ids
    assert is_greedy(model, prompt, answer) and is_greedy(merge_lora(model), prompt, answer)
    assert not is_greedy(random_llama(tiny_config()), prompt, answer)


def test_stacked_adapters_are_each_alone():
    """In one batch: the model alone, an adapter of another rank, and one of other layers."""
    adapters = [adapted(1), adapted(2, rank=5, alpha=3.0), adapted(3, targets=["down_proj"])]
    model = stack_lora(random_llama(tiny_config()), [lora_of(adapter) for adapter in adapters])
    ids = np.array([[0], [2], [1], [3], [2]], np.int32)
    got = call(model, np.repeat(TOKENS, 5, axis=0), adapter_ids=np.broadcast_to(ids, (5, 12)))
    alone = [logits(random_llama(tiny_config()))[0], *(logits(adapter)[0] for adapter in adapters)]
    for row, adapter_id in enumerate(ids[:, 0]):
        np.testing.assert_allclose(got[row], alone[adapter_id], atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits(model)[0], alone[0], atol=1e-5, rtol=0)  # no ids: the model alone
    with pytest.raises(ValueError, match="several adapters; only one can be merged"):
        merge_lora(model)


def test_one_ragged_batch_of_several_adapters():
    """The same prompt under each adapter in one engine, twice: the prefix cache does not mix them."""
    adapters = [adapted(1), adapted(2, rank=5, alpha=3.0), adapted(3, targets=["down_proj"])]
    prompt, params = TOKENS[0].tolist(), {"temperature": 0, "max_tokens": 6}
    stacked = stack_lora(random_llama(tiny_config()), [lora_of(adapter) for adapter in adapters])
    engine = Engine(stacked, **ENGINE | {"max_num_seqs": 4, "max_num_batched_tokens": 24})
    each = [SamplingParams(**params, adapter_id=adapter_id) for adapter_id in (2, 0, 1)]
    answers = []
    for expected_cached in (0, 8):
        outputs = engine.generate([prompt] * 3, each)
        answers.append([output.outputs[0].token_ids for output in outputs])
        assert [output.num_cached_tokens for output in outputs] == [expected_cached] * 3
    assert answers[0] == answers[1]
    for model, answer in zip((adapters[1], random_llama(tiny_config()), adapters[0]), answers[0], strict=True):
        assert is_greedy(model, prompt, answer)
    assert engine.generate([prompt], each[0])[0].outputs[0].token_ids == answers[0][0]
    with pytest.raises(ValueError, match="adapter_id=4: the model has 3 stacked adapters"):
        engine.generate([prompt], SamplingParams(adapter_id=4))
    with pytest.raises(ValueError, match=r"SamplingParams\(adapter_id=-1\): expected 0 for the model alone"):
        SamplingParams(adapter_id=-1)


def test_models_with_adapters_are_not_saved_whole(tmp_path):
    with pytest.raises(ValueError, match="merge_lora it first, or write them alone with save_adapter"):
        save_model(adapted(), tmp_path / "model")


@pytest.mark.parametrize("format", ["orbax", "peft"])
def test_files(tmp_path, format):
    model = adapted(alpha=5.0, targets=["o_proj", "up_proj"])
    save_adapter(model, tmp_path / "a", format=format)
    assert (
        not list(tmp_path.glob(".*"))
        and sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 1e5
    )
    loaded = load_adapter(adapted(7), tmp_path / "a")  # in place of another
    np.testing.assert_array_equal(logits(loaded), logits(model))
    half = read_adapter(model, tmp_path / "a", dtype=jnp.bfloat16)
    assert {lora.a.dtype for lora in half.values()} == {jnp.dtype(jnp.bfloat16)} and len(half) == 4
    with pytest.raises(FileExistsError):
        save_adapter(model, tmp_path / "a")
    smaller = random_llama(tiny_config(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"layers\.1\.(mlp|self_attn)\."):
        load_adapter(smaller, tmp_path / "a")
    assert not has_lora(smaller)
    other = random_llama(tiny_config(hidden_size=32))
    with pytest.raises(ValueError, match="has factors"):
        load_adapter(other, tmp_path / "a")


def test_bad_files(tmp_path):
    model = adapted()
    with pytest.raises(FileNotFoundError, match="no adapter_config.json"):
        load_adapter(model, tmp_path)
    save_adapter(model, tmp_path / "a", format="peft")
    config = tmp_path / "a" / "adapter_config.json"
    values = json.loads(config.read_text())
    for change, message in (
        ({"use_dora": True}, "sets use_dora"),
        ({"bias": "all"}, "sets bias"),
        ({"peft_type": "IA3"}, "IA3"),
    ):
        config.write_text(json.dumps(values | change))
        with pytest.raises(ValueError, match=message):
            load_adapter(model, tmp_path / "a")
    config.write_text(json.dumps(values))
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    safetensors.numpy.save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj has no lora_A"):
        load_adapter(model, tmp_path / "a")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="neither adapter_model.safetensors nor weights/"):
        load_adapter(model, tmp_path / "a")
    with pytest.raises(ValueError, match="expected 'orbax' or 'peft'"):
        save_adapter(model, tmp_path / "b", format="safetensors")
    with pytest.raises(ValueError, match="got none"):
        save_adapter(remove_lora(model), tmp_path / "b")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_rslora", [False, True])
def test_peft_reads_ours_and_we_read_theirs(tmp_path, use_rslora):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    model = adapted(alpha=5.0)
    config = transformers.LlamaConfig(**{k: v for k, v in model.config.to_hf().items() if k != "architectures"})

    def theirs():
        reference = transformers.LlamaForCausalLM(config).float()
        arrays = {
            f"model.{k}": v for k, v in flat_arrays(random_llama(tiny_config())).items() if not k.startswith("lm_head")
        }
        arrays["lm_head.weight"] = flat_arrays(model)["lm_head.weight"]
        reference.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
        return reference

    def their_logits(reference):
        with torch.no_grad():
            return reference(torch.tensor(TOKENS).long()).logits.numpy()

    save_adapter(model, tmp_path / "ours", format="peft")
    reference = peft.PeftModel.from_pretrained(theirs(), tmp_path / "ours")
    np.testing.assert_allclose(their_logits(reference), logits(model), atol=2e-4, rtol=0)

    options = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["k_proj", "gate_proj"], init_lora_weights=False, use_rslora=use_rslora
    )
    reference = peft.get_peft_model(theirs(), options)
    reference.save_pretrained(tmp_path / "theirs")
    loaded = load_adapter(random_llama(tiny_config()), tmp_path / "theirs")
    np.testing.assert_allclose(logits(loaded), their_logits(reference), atol=2e-4, rtol=0)
