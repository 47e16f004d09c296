"""What each route does: one method per route of the table.

Knows: the client of the text side, the model's facts. Refuses to know: ASGI (``api.exchange``), keys (``api.auth``).
"""

import time
from typing import Any

from branchline.api.errors import ApiError, unavailable
from branchline.api.exchange import Exchange
from branchline.api.generate import answer
from branchline.api.insight import Insight
from branchline.api.openapi import document
from branchline.api.parse import Call, ServedNames, chat_call, chat_prompt, completion_call, pin_prompt
from branchline.api.readiness import judge
from branchline.api.routes import Handler
from branchline.api.schemas import ChatBody, CompletionBody, DetokenizeBody, PinBody, TokenizeBody
from branchline.base.clock import Clock
from branchline.base.config import ServerConfig
from branchline.base.errors import BranchlineError, InvalidRequest
from branchline.base.version import __version__
from branchline.observe.metrics import CONTENT_TYPE, Metrics
from branchline.wire.client import TextClient
from branchline.wire.messages import ChatPrompt, Controlled, ModelFacts, TextPrompt


class Service:
    """The handlers and what they share. ``is_draining`` only ever turns true: a drained server is on its way out."""

    def __init__(
        self, client: TextClient, facts: ModelFacts, config: ServerConfig, *, step_timeout_s: float, clock: Clock
    ) -> None:
        self.client = client
        self.facts = facts
        self.config = config
        self.names = ServedNames.of(facts, config.served_model_name)
        self.metrics = Metrics(client, facts, clock, __version__, self.names.served)
        self.insight = Insight(client, config)
        self.is_draining = False
        self._clock = clock
        self._step_timeout_s = step_timeout_s
        self._created = int(time.time())

    @property
    def handlers(self) -> dict[str, Handler]:
        return {
            "health": self.health,
            "ready": self.ready,
            "models": self.list_models,
            "model": self.show_model,
            "completions": self.completions,
            "chat_completions": self.chat_completions,
            "tokenize": self.tokenize,
            "detokenize": self.detokenize,
            "version": self.version,
            "openapi": self.openapi,
            "metrics": self.show_metrics,
            "pin": self.pin,
            "flush_cache": self.flush_cache,
            "pause_generation": self.pause_generation,
            "continue_generation": self.continue_generation,
            "drain": self.drain,
            "abort_all": self.abort_all,
            **self.insight.handlers,
        }

    # ------------------------------------------------------------ state

    async def health(self, exchange: Exchange) -> None:
        if self.client.is_dead:
            raise unavailable("The engine has gone.", "engine_gone")
        await exchange.reply_json({"status": "ok"})

    async def ready(self, exchange: Exchange) -> None:
        verdict = judge(self.client, self._clock, step_timeout_s=self._step_timeout_s, is_draining=self.is_draining)
        await exchange.reply_json(verdict.as_json(), 200 if verdict.is_ready else 503)

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json({"version": __version__})

    async def openapi(self, exchange: Exchange) -> None:
        await exchange.reply_json(document(__version__))

    async def show_metrics(self, exchange: Exchange) -> None:
        await exchange.reply(200, self.metrics.render(), [(b"content-type", CONTENT_TYPE.encode())])

    async def list_models(self, exchange: Exchange) -> None:
        await exchange.reply_json({"object": "list", "data": [self._model()]})

    async def show_model(self, exchange: Exchange) -> None:
        self.names.check(exchange.path_params["name"])
        await exchange.reply_json(self._model())

    # ------------------------------------------------------------ generation

    async def completions(self, exchange: Exchange) -> None:
        body = await exchange.json(CompletionBody)
        await self._answer(completion_call(body, self.names, self.facts, exchange.caller), exchange)

    async def chat_completions(self, exchange: Exchange) -> None:
        body = await exchange.json(ChatBody)
        await self._answer(chat_call(body, self.names, self.facts, exchange.caller), exchange)

    async def _answer(self, call: Call, exchange: Exchange) -> None:
        if self.is_draining:
            raise unavailable("The server is draining and takes no new requests.", "draining")
        self.insight.remember(exchange, call.envelope.id)
        await answer(call, self.client, exchange, self._clock, self.metrics)

    # ------------------------------------------------------------ tokens

    async def tokenize(self, exchange: Exchange) -> None:
        body = await exchange.json(TokenizeBody)
        self.names.check(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either `prompt` or `messages`.", param="prompt")
        is_chat = body.messages is not None
        prompt: TextPrompt | ChatPrompt = (
            chat_prompt(body.messages or (), body) if is_chat else TextPrompt(body.prompt or "")
        )
        special = not is_chat if body.add_special_tokens is None else body.add_special_tokens
        result = await self.client.tokenize(prompt, add_special_tokens=special)
        await exchange.reply_json(
            {
                "count": len(result.tokens),
                "max_model_len": self.facts.context_length,
                "tokens": result.tokens,
                "token_strs": result.pieces if body.return_token_strs else None,
            }
        )

    async def detokenize(self, exchange: Exchange) -> None:
        body = await exchange.json(DetokenizeBody)
        self.names.check(body.model)
        if any(token >= self.facts.vocab_size for token in body.tokens):
            raise InvalidRequest(f"`tokens` has an id that is not below {self.facts.vocab_size}.", param="tokens")
        result = await self.client.detokenize(tuple(body.tokens))
        await exchange.reply_json({"prompt": result.text})

    # ------------------------------------------------------------ admin

    async def pin(self, exchange: Exchange) -> None:
        body = await exchange.json(PinBody)
        result = await self.client.pin(
            pin_prompt(body),
            seconds=body.seconds,
            tenant=body.tenant or "",
            salt=body.cache_salt or body.prompt_cache_key or "",
            add_special_tokens=body.add_special_tokens is not False,
        )
        await self._report(result, exchange)

    async def flush_cache(self, exchange: Exchange) -> None:
        await self._control("flush", exchange)

    async def pause_generation(self, exchange: Exchange) -> None:
        await self._control("pause", exchange)

    async def continue_generation(self, exchange: Exchange) -> None:
        await self._control("continue", exchange)

    async def drain(self, exchange: Exchange) -> None:
        self.is_draining = True
        await self._control("drain", exchange)

    async def abort_all(self, exchange: Exchange) -> None:
        await self._control("abort_all", exchange)

    async def _control(self, verb: str, exchange: Exchange) -> None:
        await self._report(await self.client.control(verb), exchange)

    async def _report(self, result: Controlled, exchange: Exchange) -> None:
        if not result.done:
            raise ApiError(409, result.message or "The engine cannot do that now.", code="not_done")
        await exchange.reply_json({"done": True, "message": result.message})

    # ------------------------------------------------------------ shutdown

    async def begin_drain(self) -> None:
        """From now on new generation is refused here and in the engine; ``/ready`` says so."""
        self.is_draining = True
        await self._tell("drain")

    async def abort_running(self) -> None:
        """End what is still running: streams get an error event, not silence."""
        await self._tell("abort_all")

    async def _tell(self, verb: str) -> None:
        try:
            await self.client.control(verb, timeout_s=1.0)
        except BranchlineError:
            return  # the engine has gone or is busy: the caller's own time limit decides

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.names.served,
            "object": "model",
            "created": self._created,
            "owned_by": "branchline",
            "root": self.facts.name,
            "max_model_len": self.facts.context_length,
        }
