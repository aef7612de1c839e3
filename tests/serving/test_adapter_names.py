"""LoRA adapters behind one server: a call's model name chooses, and different ones are answered in one batch."""

import asyncio
import importlib.util
from pathlib import Path

import httpx
import jax
import openai
import pytest
from flax import nnx

from flax_paged import Engine, SamplingParams, load_model, load_tokenizer
from flax_paged.serving import Service, create_app
from flax_paged.training import add_lora, lora_of, save_adapter

PATH = Path(__file__).parents[2] / "scripts" / "serve.py"
PROMPT = "The licence says that"
NAMES = ("tiny", "heron", "crane")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("serve_script", PATH)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    """Folders of two adapters that change what the model says, of different formats and ranks."""
    folders = {}
    for seed, (name, format) in enumerate({"heron": "orbax", "crane": "peft"}.items(), 1):
        model = add_lora(load_model(checkpoint), rank=2 * seed, rngs=nnx.Rngs(seed))
        for i, lora in enumerate(lora_of(model).values()):
            lora.b[...] = jax.random.normal(jax.random.key(100 * seed + i), lora.b.shape)
        folders[name] = tmp_path_factory.mktemp("adapters") / name
        save_adapter(model, folders[name], format=format)
    return folders


def test_the_model_name_chooses_the_adapter(script, checkpoint, adapters):
    args = script.parse_args(
        ["--model", str(checkpoint), *(f"--adapter={name}={folder}" for name, folder in adapters.items())]
    )
    model = load_model(checkpoint)
    script.load_adapters(args, model)
    engine = Engine(
        model, load_tokenizer(checkpoint), max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, num_pages=16
    )
    expected = {}  # one at a time
    for adapter_id, name in enumerate(NAMES):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, adapter_id=adapter_id)
        expected[name] = engine.generate([PROMPT], params)[0].outputs[0].text
    assert len(set(expected.values())) == 3

    async def scenario(client):
        assert [model.id async for model in client.models.list()] == list(NAMES)
        assert (await client.models.retrieve("crane")).parent == "tiny"
        names = [*NAMES, *NAMES]
        options = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
        answers = await asyncio.gather(*(client.completions.create(model=name, **options) for name in names))
        assert [(answer.model, answer.choices[0].text) for answer in answers] == [(n, expected[n]) for n in names]
        messages = [{"role": "user", "content": "Hello"}]
        chats = [
            await client.chat.completions.create(model=name, messages=messages, max_tokens=8, temperature=0)
            for name in NAMES
        ]
        assert [chat.model for chat in chats] == list(NAMES)
        assert len({chat.choices[0].message.content for chat in chats}) == 3
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="gpt", prompt=PROMPT)

    async def main():
        service = Service(script.server_options(args))
        service.start(engine)
        http_client = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), timeout=600)
        try:
            async with openai.AsyncOpenAI(
                base_url="http://here/v1", api_key="any", max_retries=0, http_client=http_client
            ) as client:
                await scenario(client)
        finally:
            await asyncio.to_thread(service.close)

    asyncio.run(main())


def test_one_without_a_name_is_always_used(script, checkpoint, adapters):
    args = script.parse_args(["--model", str(checkpoint), "--adapter", str(adapters["heron"])])
    assert script.server_options(args).adapter_names == ()
    model = load_model(checkpoint)
    script.load_adapters(args, model)
    assert {lora.rank for lora in lora_of(model).values()} == {2}


@pytest.mark.parametrize(
    "adapters, message",
    [
        (["a=x", "y"], "expected NAME=FOLDER for each"),
        (["a=x", "a=y"], "expected names that all differ"),
        (["any=x"], "expected names that all differ"),
        (["=x"], "expected names that all differ"),
    ],
)
def test_names_that_do_not_tell_them_apart(script, adapters, message):
    args = script.parse_args(["--model", "any", *(f"--adapter={adapter}" for adapter in adapters)])
    with pytest.raises(ValueError, match=message):
        script.server_options(args)
