"""The route table as an OpenAPI document. It is made from the table and the structs, so it cannot say anything else.

Knows: OpenAPI's skeleton. Refuses to know: any single route.
"""

import re
from typing import Any

import msgspec

from branchline.api.auth import Access
from branchline.api.routes import TABLE, Endpoint

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def document(version: str) -> dict[str, Any]:
    """Paths, bodies and security of every route."""
    bodies = [endpoint.body for endpoint in TABLE if endpoint.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in TABLE:
        paths.setdefault(_PARAMETER.sub(r"{\1}", endpoint.path), {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Branchline", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "security": [] if endpoint.access is Access.PUBLIC else [{"key": []}],
        "responses": {
            "200": {"description": "Done.", "content": {endpoint.content_type: {}}},
            "default": {"description": "An error, in OpenAI's shape."},
        },
    }
    if names := _PARAMETER.findall(endpoint.path):
        schema = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema} for name in names]
    if endpoint.body is not None:
        schema = {"$ref": _REF.format(name=endpoint.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
