"""The audit trail: which bytes each version was, who has sent it, when it was committed and where.

| file | what it has |
| --- | --- |
| `record` | one record of an engine's audit file: as a line, hashed and signed |
| `audit_file` | append records to a file that several processes and engines can share; read them |
| `chain` | prove a chain of records, from a checkpoint's digest to a version |
| `engine_chain` | the chain of an audit file |
| `log_chain` | the chain of a delta log, from what its senders have written |

A record of the sender is in the log: what ``DONE`` says, see `engine_ext.log.publication`. A record
of the engine is in its audit file (``--delta-audit-file``).

Imports: `engine_ext.log`, `engine_ext.format`, `engine_ext.files`, `engine_ext.errors`.
"""

from engine_ext.audit.audit_file import AuditFile, read_lines
from engine_ext.audit.chain import Chain, Link, forks, prove
from engine_ext.audit.engine_chain import EngineTrail, Reached, read_engine_trail
from engine_ext.audit.log_chain import read_log_trail
from engine_ext.audit.record import AuditRecord

__all__ = [
    "AuditFile",
    "AuditRecord",
    "Chain",
    "EngineTrail",
    "Link",
    "Reached",
    "forks",
    "prove",
    "read_engine_trail",
    "read_lines",
    "read_log_trail",
]
