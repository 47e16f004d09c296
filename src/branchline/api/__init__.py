"""The HTTP side: OpenAI's routes over one :class:`~branchline.wire.client.TextClient`.

    Gate (host, route, key) -> Service (one method per route) -> parse (body -> Call) -> generate (Call -> events -> bytes)

Knows: HTTP, JSON, the shapes clients expect. Refuses to know: tokens, templates, the scheduler.
"""
