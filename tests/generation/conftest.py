import pytest
from toy import ToyModel

from flax_paged.generation.engine import Engine


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
