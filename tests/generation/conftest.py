import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from toy import ToyModel

from flax_paged.generation.engine import Engine


@pytest.fixture(scope="package", autouse=True)
def compilation_cache(tmp_path_factory):
    """Many tests make an engine over the same model: each program is compiled once."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("jax_cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    old = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    reset_cache()
    yield
    for name, value in old.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="session")
def model():
    return ToyModel()


@pytest.fixture(scope="session")
def shared_engine(model):
    """Return an idle engine of these sizes over the toy model, made once; its prefix cache is emptied."""
    engines = {}

    def get(**options):
        sizes = {"num_pages": 64, "page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
        options = {**sizes, **options}
        key = tuple(sorted(options.items()))
        if key not in engines:
            engines[key] = Engine(model, **options)
        engine = engines[key]
        assert not engine.has_unfinished_requests and engine.scheduler.pool.num_live == 0
        engine.scheduler.pool.forget_all()
        return engine

    return get
