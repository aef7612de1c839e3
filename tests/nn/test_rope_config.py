import dataclasses

import pytest

from flax_paged.nn import RopeConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "truncate": False}
LONGROPE = {"short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0], "original_max_position_embeddings": 32}
SCALINGS = [
    ("default", {}),
    ("linear", {"factor": 4.0}),
    ("dynamic", {"factor": 2.0}),
    ("yarn", YARN),
    ("llama3", LLAMA3),
    ("longrope", LONGROPE),
]


@pytest.mark.parametrize(("rope_type", "scaling"), SCALINGS, ids=[name for name, _ in SCALINGS])
def test_all_spellings_mean_the_same(rope_type, scaling):
    new = RopeConfig.from_hf({"rope_parameters": {"rope_type": rope_type, "rope_theta": 5e5, **scaling}})
    assert new.theta == 5e5
    assert new.rope_type == rope_type
    spellings = [
        {"rope_theta": 500000, "rope_scaling": {"rope_type": rope_type, **scaling}},
        {"rope_theta": 5e5, "rope_scaling": {"type": rope_type, **scaling}},
        {"rope_theta": 5e5, "rope_scaling": {"type": rope_type, "rope_type": rope_type, **scaling}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": rope_type, **scaling}},
        {"rope_parameters": {"type": rope_type, "rope_theta": 5e5, **scaling}, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": rope_type, **scaling}},
    ]
    for values in spellings:
        assert RopeConfig.from_hf(values) == new, values
    assert RopeConfig.from_hf(new.to_hf()) == new
    old_only, new_only = new.to_hf(), new.to_hf()
    del old_only["rope_parameters"], new_only["rope_theta"], new_only["rope_scaling"]
    assert RopeConfig.from_hf(old_only) == RopeConfig.from_hf(new_only) == new
    hash(new)


def test_what_is_left_out():
    assert RopeConfig.from_hf({}) == RopeConfig(10000.0)
    assert RopeConfig.from_hf({}, default_theta=7.0).theta == 7.0
    assert RopeConfig.from_hf({"rope_scaling": None, "rope_theta": 3}).theta == 3.0
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 2}, "max_position_embeddings": 64}
    assert RopeConfig.from_hf(yarn).original_max_position_embeddings == 64
    top = {**yarn, "original_max_position_embeddings": 16}
    assert RopeConfig.from_hf(top).original_max_position_embeddings == 16
    both = {**top, "rope_scaling": {**yarn["rope_scaling"], "original_max_position_embeddings": 32}}
    assert RopeConfig.from_hf(both).original_max_position_embeddings == 16  # as in transformers, the top level wins
    assert RopeConfig.from_hf({"partial_rotary_factor": 0.5}).partial_rotary_factor == 0.5


PARAMETERS = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_parameters": PARAMETERS, "rope_theta": 1e4}, "rope_theta=10000.0 and rope_parameters.rope_theta=5"),
        (
            {"rope_parameters": PARAMETERS, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters=.* and rope_scaling=",
        ),
        (
            {"rope_parameters": PARAMETERS, "rope_scaling": {**PARAMETERS, "factor": 32.0}},
            "rope_parameters=.* and rope_scaling=",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "type": "linear", **LLAMA3}}, "rope_type='llama3' and type='linear'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not known; expected one of .*'yarn'"),
        ({"rope_scaling": {"factor": 8.0}}, "has no rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs"),
        ({"rope_scaling": {"rope_type": "yarn", "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": PARAMETERS}}, "has no rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast=3.0 has no meaning"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, "factor=-2.0: expected a positive"),
        ({"rope_theta": -1}, "theta=-1.0: expected a positive"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5: expected at most 1"),
        ({"rope_parameters": {**PARAMETERS, "low_freq_factor": 4}}, "low_freq_factor=4.0 must be below"),
        ({"rope_scaling": {"rope_type": "longrope", **LONGROPE, "short_factor": [0.0, 1.0]}}, "positive numbers"),
    ],
)
def test_what_cannot_be_right_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(values)


@pytest.mark.parametrize(
    ("config", "head_dim", "message"),
    [
        (RopeConfig(), 7, "gives 7 rotated"),
        (RopeConfig(partial_rotary_factor=0.5), 6, "gives 3 rotated"),
        (RopeConfig(partial_rotary_factor=0.1), 8, "gives 0 rotated"),
        (RopeConfig(rope_type="dynamic", factor=2.0), 2, "at least 4"),
        (RopeConfig.from_hf({"rope_scaling": {"rope_type": "longrope", **LONGROPE}}), 8, "has 2 numbers; expected 4"),
    ],
)
def test_head_dims_that_do_not_fit_are_refused(config, head_dim, message):
    with pytest.raises(ValueError, match=message):
        config.rotary_dim(head_dim)


def test_no_field_is_dropped_on_the_way():
    full = RopeConfig(
        2e4, "yarn", 0.5, 4.0, 64, attention_factor=0.9, beta_fast=8.0, beta_slow=2.0, mscale=0.5, mscale_all_dim=0.7
    )
    written = full.to_hf()["rope_parameters"]
    expected = {f.name for f in dataclasses.fields(full) if getattr(full, f.name) is not None}
    assert set(written) == (expected - {"theta"}) | {"rope_theta"}
