"""Requests drawn from the server's own schema, valid and not; `scripts/bench/fuzz.py` sends thousands."""

import importlib.util
import sys
import warnings

import httpx

from tests.sandbox.helpers import ROOT


def _fuzz():
    folder = str(ROOT / "scripts" / "bench")
    sys.path.insert(0, folder)
    try:
        spec = importlib.util.spec_from_file_location("bench_fuzz", f"{folder}/fuzz.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def test_no_request_makes_the_server_fail(server):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz = _fuzz()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.socket))) as client:
            requests = fuzz.draw(client.get("http://sandbox/openapi.json").json(), 300, number=1)
            statuses, problems = fuzz.send(str(server.socket), requests, threads=2)
            assert client.get("http://sandbox/v1/health").status_code == 200
    assert not problems, problems[:3]
    assert len(requests) == 300 == sum(statuses.values())
    assert statuses[202] and statuses[422] and statuses[404]
