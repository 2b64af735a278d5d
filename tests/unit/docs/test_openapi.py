"""docs/openapi.json describes what the server takes and answers."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from delta_server.generation_guard import READY_PATH
from delta_server.request_options import DiskRequest, Options
from delta_server.routes import attach
from scripts.doc_tables.__main__ import DOCS
from tests.support.delta_bodies import delta_part
from tests.support.endpoint_rig import Rig

DOCUMENT: dict[str, Any] = json.loads((DOCS / "openapi.json").read_text())


def validator(name: str) -> Draft202012Validator:
    schemas = DOCUMENT["components"]["schemas"]
    reference = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
    return Draft202012Validator(reference)


def test_it_has_every_route() -> None:
    app = FastAPI(openapi_url=None)
    attach(app)
    served = {(r.path, m.lower()) for r in app.routes if isinstance(r, APIRoute) for m in r.methods}
    assert served == {(p, m) for p, methods in DOCUMENT["paths"].items() for m in methods}


def test_it_has_every_parameter() -> None:
    parameters = DOCUMENT["paths"]["/update_weights_delta"]["post"]["parameters"]
    names = {p["name"] for p in parameters if p["in"] == "query"}
    assert names == {*Options.__struct_fields__, "adapter", "commit"}
    fields = DOCUMENT["components"]["schemas"]["DiskRequest"]["properties"]
    assert fields.keys() == {*DiskRequest.__struct_fields__}


def test_answers_fit(rig: Rig) -> None:
    body = delta_part()
    committed, repeated = rig.send(body), rig.send(body)
    for response in (committed, repeated):
        assert response.status_code == 200
        validator("Answer").validate(response.json())
    validator("EngineStatus").validate(rig.get("/delta_status?plan=true&history=true").json())
    refused = rig.send(body[:-1])
    validator("Refusal").validate(refused.json())
    answers = DOCUMENT["paths"]["/update_weights_delta"]["post"]["responses"]
    assert refused.json()["error"]["type"] in answers[str(refused.status_code)]["description"]


def test_answers_of_probes_fit(rig: Rig) -> None:
    check = validator("Ready")
    for path in (READY_PATH, f"{READY_PATH}?min_version=99"):
        for peer in (("127.0.0.1", 9), ("192.0.2.7", 9)):
            check.validate(rig.get(path, peer=peer).json())
