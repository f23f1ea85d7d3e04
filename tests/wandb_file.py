"""Reads what an offline run of Weights & Biases has written, in place of its server."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32768  # of a log file as LevelDB has it: records of a checksum, a length, a kind and data
_HEADER = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The configuration of a run, and its history, a row a step."""
    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for record in _records(path.read_bytes()):
        for item in (*record.run.config.update, *record.config.update):
            config[item.key] = json.loads(item.value_json)
        items = record.history.item
        if items:
            history.append(
                {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            )
    return config, history


def _records(data: bytes) -> Iterator[Record]:
    place, parts = 7, b""  # behind the file's own header
    while place + _HEADER.size <= len(data):
        room = _BLOCK - place % _BLOCK
        if room < _HEADER.size:
            place += room
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        parts += data[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
