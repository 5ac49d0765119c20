"""What an engine cannot do with halfbyte's cache is one clear error at its start."""

from __future__ import annotations

import pytest
from engines import engine, name_of

from halfbyte.errors import HalfbyteError


def refused(backend: str, **options) -> str:
    with pytest.raises((ValueError, RuntimeError, HalfbyteError)) as caught, engine(backend=backend, **options):
        pass
    return str(caught.value)


def test_an_unknown_pair_of_formats() -> None:
    assert "HALFBYTE_INT3__INT8" in refused("HALFBYTE_INT3__INT8")


def test_a_cache_dtype_beside_the_formats() -> None:
    assert "kv_cache_dtype" in refused(name_of("int8", "int8"), kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefil": "exact"}, "prefil"),
        ({"plan": "plan.json"}, "all layers have the formats in the backend's name"),
        ({"prefill": "always"}, "prefill='always'"),
        ({"rotate_keys": 1}, "rotate_keys=1"),
    ],
)
def test_wrong_options(options: dict[str, object], said: str) -> None:
    assert said in refused(name_of("int8", "int8"), additional_config={"halfbyte": options})
