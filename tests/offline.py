"""What lies in the file of an offline W&B run, read with W&B's own reader."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(file: Path) -> Iterator[Any]:
    """Every record of a `.wandb` file."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def wandb_values(file: Path) -> dict[str, Any]:
    """The last value that was logged under each name."""
    found: dict[str, Any] = {}
    for record in wandb_records(file):
        for item in record.history.item:
            found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found
