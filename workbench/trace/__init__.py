"""The record of a run: frozen row types, a recorder shared by its engines, Parquet files."""

from workbench.trace.files import SCHEMA_VERSION, Trace, read_table, write_table
from workbench.trace.recorder import Recorder
from workbench.trace.rows import NodeRow, RequestRow, SpanRow, StepCounts, StepRow

__all__ = [
    "SCHEMA_VERSION",
    "NodeRow",
    "Recorder",
    "RequestRow",
    "SpanRow",
    "StepCounts",
    "StepRow",
    "Trace",
    "read_table",
    "write_table",
]
