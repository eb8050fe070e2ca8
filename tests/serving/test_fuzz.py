"""Requests drawn from the server's OpenAPI description: answered or refused, never its fault."""

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.conftest import require_idle, running
from tests.serving.test_refusals import ask

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip
MODELS = ["tiny-solver", "tiny-solver", "tiny-prm", "search/beam", "none"]
LENGTHS = ("max_tokens", "max_completion_tokens")
ANSWERED = Counter()  # requests, by status


@pytest.fixture(scope="module")
def service():
    with running(timeout=5.0) as service:
        yield service
        require_idle(service)
        assert ANSWERED[200] and ANSWERED[400], "some are answered, some refused"


@pytest.fixture(scope="module")
def described(service):
    """The bodies of all POST requests by their paths, and the schemas they refer to."""
    whole = json.loads(ask(service, "/openapi.json", None)[1])
    bodies = {
        path: how["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, how in whole["paths"].items()
        if "post" in how
    }
    return bodies, whole["components"]["schemas"]


def values(schema, schemas, name=""):
    """What a schema allows, or now and then anything."""
    if name == "model":
        right = st.sampled_from(MODELS)
    elif "$ref" in schema:
        right = values(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    elif "anyOf" in schema:
        right = st.one_of([values(each, schemas) for each in schema["anyOf"]])
    elif "const" in schema or "enum" in schema:
        right = st.sampled_from(schema.get("enum", [schema.get("const")]))
    elif schema.get("type") == "object" and "properties" in schema:
        parts = {k: values(each, schemas, k) for k, each in schema["properties"].items()}
        needed = {k: parts.pop(k) for k in schema.get("required", ())}
        right = st.fixed_dictionaries(needed, optional=parts)
    elif schema.get("type") == "array":
        least, most = schema.get("minItems", 0), min(3, schema.get("maxItems", 3))
        right = st.lists(values(schema.get("items", {}), schemas), min_size=least, max_size=most)
    elif schema.get("type") == "integer":
        low, high = schema.get("minimum", 0), schema.get("maximum", 9)
        right = st.integers(low, min(high, low + 300))
    elif schema.get("type") == "number":
        above, below = (schema.get(f"exclusive{end}") for end in ("Minimum", "Maximum"))
        low = schema.get("minimum", above or 0)
        high = schema.get("maximum", 9 if below is None else below)
        shut = {"exclude_min": above is not None, "exclude_max": below is not None}
        right = st.floats(low, high, **shut)
    else:
        kinds = {"string": st.text(max_size=12), "boolean": st.booleans(), "null": st.none()}
        right = kinds.get(schema.get("type"), ANYTHING)
    return st.one_of([right] * 14 + [ANYTHING])


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_whatever_is_sent_the_server_answers_or_refuses(service, described, data):
    """A 200, a refusal that names its reason, or a deadline; no status 500."""
    bodies, schemas = described
    path = data.draw(st.sampled_from(sorted(bodies)))
    body = data.draw(values(bodies[path], schemas))
    if isinstance(body, dict):
        body |= {name: 3 for name in LENGTHS if body.get(name) is not None}  # ends soon
        if path.startswith("/v1/") and not str(body.get("model")).startswith("search"):
            body["max_tokens"] = 3
    status, text = ask(service, path, json.dumps(body).encode())
    ANSWERED[status] += 1
    assert status in (200, 400, 404, 409, 503, 504), (status, text)
    if status != 200:
        error = json.loads(text)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"] and "Traceback" not in error["message"]
        assert error["param"] is not None or status in (409, 503, 504)
