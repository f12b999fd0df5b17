"""Checkpoint code without I/O: regions, the ranges that a reader needs from them, values, headers and manifests."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.format.manifest import (
    FileEntry,
    Manifest,
    Piece,
    RankPart,
    TensorEntry,
    contribution_to_bytes,
    contributions_from_bytes,
    manifest_from_bytes,
    manifest_to_bytes,
    merged,
)
from paceline.train.checkpoint.format.regions import Flat, TensorBlock, whole


def piece_of(region):
    return Piece.of("rank_00000_000.safetensors", "w", 64, region, ("0" * 32,))


PIECE = piece_of(whole((2, 3)))

ENTRY = TensorEntry("F32", (2, 3), (PIECE,))

PART = RankPart(0, {PIECE.file: FileEntry(88, 64, "1" * 32)}, {"w": ENTRY})

MANIFEST = Manifest(
    step=7,
    sequence=3,
    token="ab",
    world_size=1,
    written_at_s=1.5,
    paceline="0.1.0",
    files=PART.files,
    tensors=PART.tensors,
    values={"a": [1, {"$tuple": []}]},
)


def test_a_manifest_comes_back_as_it_was():
    assert manifest_from_bytes(manifest_to_bytes(MANIFEST), "m") == MANIFEST
    boxed = replace(
        MANIFEST,
        step=None,
        here=(),
        tensors={"w": replace(ENTRY, pieces=(piece_of(TensorBlock((0, 0), (2, 3))),))},
    )
    assert manifest_from_bytes(manifest_to_bytes(boxed), "m") == boxed
    assert contributions_from_bytes(b"[" + contribution_to_bytes(PART, {}) + b"]") == (
        [PART],
        {},
    )
    assert json.loads(manifest_to_bytes(MANIFEST))["tensors"]["w"]["pieces"][0]["flat"] == [0, 6]


def test_a_manifest_that_is_cut_or_flipped_anywhere_is_noticed():
    text = manifest_to_bytes(MANIFEST)
    for at in range(len(text)):
        with pytest.raises(CheckpointDamagedError, match="m (is truncated or was changed|was changed|is empty)"):
            manifest_from_bytes(text[:at], "m")
        with pytest.raises(CheckpointError, match=r"^m "):
            manifest_from_bytes(text[:at] + bytes([text[at] ^ 4]) + text[at + 1 :], "m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            b'{"format": "paceline-checkpoint", "version": 9}',
            "m has version 9 of the format; this Paceline reads version 1",
        ),
        (b'{"format": "other", "version": 1}', "its format is 'other'"),
    ],
)
def test_foreign_and_newer_manifests_are_refused(text, said):
    with pytest.raises(CheckpointError, match=said):
        manifest_from_bytes(text, "m")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            TensorEntry("F32", (2, 3), (piece_of(Flat(0, 2)),)),
            "the elements 0 to 2 are held twice",
        ),
        (TensorEntry("F64", (2, 3), ()), r"w is F32 \[2, 3\] on rank 0, but F64 \[2, 3\] on rank 1"),
    ],
)
def test_parts_that_do_not_make_up_a_state_are_refused(other, said):
    with pytest.raises(CheckpointError, match=said):
        merged([PART, RankPart(1, {}, {"w": other})])
