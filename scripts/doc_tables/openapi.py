"""``docs/openapi.json``: the delta endpoints for client generators.

Paths, summaries, bodies, errors and the status are read from the code. Other answers are plain
dicts there, so their schemas are written here; a test compares them with what the server answers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import msgspec

import engine_ext
from delta_server.generation_guard import READY_PATH
from delta_server.readiness import Ready
from delta_server.request_options import (
    COMMITS,
    PAUSE_MODES,
    DiskRequest,
    GroupRequest,
    PullRequest,
    RpcRequest,
    RunRequest,
    VersionRequest,
)
from engine_ext.errors import BY_NAME, DeltaError
from engine_ext.ranks.status import EngineStatus
from scripts.doc_tables.reference import routes, summary

_INTEGER: Final = {"type": ["integer", "null"]}
_STRING: Final = {"type": ["string", "null"]}
_SCHEMAS: Final[dict[str, Any]] = {
    "Answer": {
        "type": "object",
        "required": ["status", "version", "timings_ms"],
        "properties": {
            "status": {"enum": ["committed", "staged", "already_applied"]},
            "version": {"type": "integer"},
            "base_version": _INTEGER,
            "run": {**_STRING, "description": "that the version is of"},
            "nnz": {"type": "integer", "description": "elements sent, without those skipped"},
            "tensors": {"type": "integer"},
            "skipped": {"type": "object", "additionalProperties": {"type": "integer"}},
            "bytes": {"type": "integer", "description": "bytes received"},
            "apply": {**_STRING, "description": "scatter, masked or reload"},
            "rollback": {"type": ["boolean", "null"]},
            "timings_ms": {"type": "object", "additionalProperties": {"type": "number"}},
            "digest": _STRING,
            "success": {"type": "boolean", "description": "routes of other trainers only"},
            "message": {"type": "string", "description": "routes of other trainers only"},
            "new_version": {"type": "string", "description": "/update_weight_version only"},
        },
        "additionalProperties": False,
    },
    "Refusal": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["type", "message", "engine_state"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string"},
                    "engine_state": {"enum": ["unchanged", "uncertain", "committed"]},
                },
            }
        },
    },
}
# The types of the JSON bodies.
_BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    "/update_weights_delta": DiskRequest,
    "/update_weights_from_disk": DiskRequest,
    "/update_weight_version": VersionRequest,
    "/pull_weights": PullRequest,
    "/collective_rpc": RpcRequest,
    "/delta_run": RunRequest,
    "/delta_commit": GroupRequest,
}
_UPDATE: Final = (
    "weight_version", "base_version", "pause_mode", "flush_cache", "reason", "adapter",
)  # fmt: skip
_PART: Final = "/delta_parts/{content}"
_QUERIES: Final[dict[str, tuple[str, ...]]] = {
    "/update_weights_delta": (*_UPDATE, "commit"),
    "/update_weights_from_disk": _UPDATE,
    "/update_weight_version": (),
    "/pull_weights": (),
    "/collective_rpc": (),
    "/delta_status": ("plan", "history", "adapter"),
    "/delta_ready": ("min_version",),
    "/delta_digest": ("scan", "adapter"),
    "/delta_dashboard": (),
    "/delta_rollback": ("pause_mode", "flush_cache", "adapter"),
    "/delta_catch_up": ("pause_mode", "flush_cache"),
    "/delta_pin": ("version",),
    "/delta_run": ("adapter",),
    "/delta_commit": ("pause_mode", "flush_cache", "adapter"),
    "/delta_parts": (),
    _PART: ("cached",),
}
_VERSION: Final = {"type": "string", "pattern": "^(0|[1-9][0-9]{0,18})$"}
_PARAMETERS: Final[dict[str, dict[str, Any]]] = {
    "weight_version": _VERSION,
    "base_version": _VERSION,
    "version": _VERSION,
    "min_version": _VERSION,
    "pause_mode": {"enum": list(PAUSE_MODES), "default": "keep"},
    "commit": {"enum": list(COMMITS), "default": COMMITS[0]},
    "flush_cache": {"enum": [True, False, "salt"], "default": True},
    "reason": {"type": "string", "pattern": "^[ -~]{1,200}$"},
    "adapter": {"type": "string", "minLength": 1},
    **{
        name: {"type": "boolean", "default": False}
        for name in ("plan", "history", "scan", "cached")
    },
}


def document() -> str:
    """Return the OpenAPI description as JSON text."""
    types = [*_BODIES.values(), EngineStatus, Ready]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    bodies = dict(zip(_BODIES, schemas[: len(_BODIES)], strict=True))
    paths: dict[str, dict[str, Any]] = defaultdict(dict)
    for route in routes():
        for method in route.methods:
            paths[route.path][method.lower()] = _operation(route.path, route.endpoint, bodies)
    found = {
        "openapi": "3.1.0",
        "info": {"title": "delta-updates", "version": engine_ext.__version__},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {**components, **_SCHEMAS},
        },
    }
    return json.dumps(found, indent=2) + "\n"


def _operation(path: str, endpoint: object, bodies: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    updates = path in bodies and path not in ("/delta_run", "/delta_commit")
    operation: dict[str, Any] = {
        "operationId": path.strip("/"),
        "summary": summary(endpoint),
        "parameters": [
            {"name": name, "in": "query", "schema": _PARAMETERS[name]} for name in _QUERIES[path]
        ],
        "responses": _page() if path == "/delta_dashboard" else _responses(path, updates),
    }
    if path == _PART:
        hash_of_part = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
        operation["operationId"] = "delta_part"
        operation["parameters"].append(
            {"name": "content", "in": "path", "required": True, "schema": hash_of_part}
        )
        operation["responses"]["200"] = {
            "description": "Done",
            "content": {"application/octet-stream": {"schema": {}}},
        }
    if path in bodies:
        content = {"application/json": {"schema": bodies[path]}}
        if path == "/update_weights_delta":
            content["application/octet-stream"] = {"schema": {}}
            operation["parameters"].append(
                {"name": "X-Delta-Signature", "in": "header", "schema": {"type": "string"}}
            )
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(path: str, updates: bool) -> dict[str, Any]:
    """Return the answers by status; queries and rollbacks share one entry for every error."""
    refusal = {"$ref": "#/components/schemas/Refusal"}
    if path == READY_PATH:
        found = {"$ref": "#/components/schemas/Ready"}
        answers = {"200": _response("Ready", found), "503": _response("Not ready", found)}
        return {**answers, "default": _response("Refused", refusal)}
    if not updates:
        described = {"$ref": "#/components/schemas/EngineStatus"}
        done = _response("Done", described if path == "/delta_status" else {"type": "object"})
        return {"200": done, "default": _response("Refused", refusal)}
    responses = {"200": _response("Done", {"$ref": "#/components/schemas/Answer"})}
    by_status: dict[int, list[type[DeltaError]]] = defaultdict(list)
    for cls in BY_NAME.values():
        by_status[cls.status].append(cls)
    for status, classes in sorted(by_status.items()):
        text = "; ".join(f"{cls.__name__}: {summary(cls)}" for cls in classes)
        responses[str(status)] = _response(text, refusal)
    return responses


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _page() -> dict[str, Any]:
    """Return the answers of the status page."""
    refusal = _response("Refused", {"$ref": "#/components/schemas/Refusal"})
    page = {"text/html": {"schema": {"type": "string"}}}
    asking = {
        "description": "Unauthorized; for a browser the page, which asks for the token",
        "content": {**refusal["content"], **page},
    }
    return {"200": {"description": "Done", "content": page}, "401": asking, "default": refusal}
