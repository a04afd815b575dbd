"""What lies in the file of an offline W&B run, which is what `wandb sync` sends.

The file is a LevelDB log of protobuf records (W&B's messages) behind seven bytes of its own; W&B's Python package has no reader.
"""

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IDENTITY, BLOCK, HEADER = b":W&B\xe1\xbe\x00", 32768, struct.Struct("<IHB")  # checksum, length, kind
PATIENCE = 60  # seconds
WHOLE, LAST = 1, 4  # kinds of a part after which a record is complete; 2 and 3 begin and continue one


def parts(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, data) of the parts of records. None crosses the border of a block; what is left there is zeros."""
    assert content.startswith(IDENTITY)
    place = len(IDENTITY)
    while place + HEADER.size <= len(content):
        if (room := BLOCK - place % BLOCK) < HEADER.size:
            place += room
            continue
        checksum, length, kind = HEADER.unpack_from(content, place)
        data = content[place + HEADER.size : place + HEADER.size + length]
        if len(data) < length:
            return  # it is being written
        assert zlib.crc32(data, zlib.crc32(bytes([kind]))) == checksum
        yield kind, data
        place += HEADER.size + length


def wandb_records(file: Path) -> list[Any]:
    """Every record of a `.wandb` file. W&B may still write when a run has been ended: its last record is waited for."""
    patience = time.monotonic() + PATIENCE
    while not (records := list(_records(file))) or records[-1].WhichOneof("record_type") != "exit":
        if time.monotonic() > patience:
            break
        time.sleep(0.1)
    return records


def _records(file: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    collected = b""
    for kind, data in parts(file.read_bytes()):
        collected += data
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(collected)
            collected = b""
            yield record


def wandb_values(file: Path) -> dict[str, Any]:
    """The last value that was logged under each name: a number, or what is said of a table, a picture or a page."""
    found: dict[str, Any] = {}
    for record in wandb_records(file):
        for item in record.history.item:
            name, *inner = item.nested_key or [item.key]
            value = json.loads(item.value_json)
            if inner:
                found.setdefault(name, {})["/".join(inner)] = value
            else:
                found[name] = value
    return found
