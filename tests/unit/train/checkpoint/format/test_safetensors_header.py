"""Headers of safetensors files."""

from __future__ import annotations

import pytest

from paceline.train.checkpoint.format.safetensors_header import header_of, length_of, read_header


def test_headers_are_those_of_the_safetensors_package():
    safetensors = pytest.importorskip("safetensors")
    header, slots = header_of([("a", "F32", (2, 3)), ("b", "BF16", ()), ("c", "C128", (1,)), ("d", "U8", (0,))])
    data = bytes(range(24 + 2 + 16))
    read = dict(safetensors.deserialize(header + data))
    assert {name: (info["dtype"], info["shape"]) for name, info in read.items()} == {
        "a": ("F32", [2, 3]),
        "b": ("BF16", []),
        "c": ("U8", [16]),  # every version of safetensors can read it as bytes
        "d": ("U8", [0]),
    }
    assert bytes(read["b"]["data"]) == data[24:26] and slots[1].offset == len(header) + 24
    assert len(header) % 8 == 0 and length_of(header) == len(header)
    assert [(each.key, each.offset) for each in read_header(header)] == [(each.key, each.offset) for each in slots]


@pytest.mark.parametrize("header", [b"", b"PK\3\4 zip!", (5).to_bytes(8, "little") + b"[1,2]"])
def test_what_is_no_safetensors_file_is_refused(header):
    with pytest.raises(ValueError, match="safetensors file"):
        read_header(header[: length_of(header)])
