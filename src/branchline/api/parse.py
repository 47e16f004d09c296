"""A checked body to a :class:`Call`: what to generate and how to answer.

Knows: how fields act together, defaults, names of models. Refuses to know: tokens and templates (the text side), JSON
(``api.body``), bytes of answers (``api.dialect``).
"""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from branchline.api.auth import Caller
from branchline.api.dialect import ChatDialect, CompletionDialect, Dialect, Envelope
from branchline.api.errors import shown
from branchline.api.schemas import (
    MAX_SEQUENCES,
    ChatBody,
    CompletionBody,
    ContentPart,
    Message,
    PinBody,
    SamplingFields,
    TokenizeBody,
)
from branchline.base.errors import InvalidRequest, UnknownModel
from branchline.core.limits import check_sampling
from branchline.core.request import SamplingParams
from branchline.wire.messages import ChatPrompt, Generate, ModelFacts, Prompt, TextPrompt, TokenPrompt

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for completions; chat has none."""

_ROLES = {"developer": "system"} | {role: role for role in ("system", "user", "assistant", "tool", "function")}
_SILENT_ROLES = frozenset({"assistant", "tool", "function"})
"""Roles that may come without content."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_RESERVED = frozenset(
    {
        "messages", "tools", "tool_choice", "documents", "functions", "chat_template", "conversation", "tokenize",
        "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict", "truncation", "padding",
        "bos_token", "eos_token", "unk_token", "pad_token",
    }
)  # fmt: skip
_TOKEN_KEY = re.compile(r"[0-9]{1,10}")
_SEED_MASK = (1 << 64) - 1
_CONSTRAINTS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


@dataclass(frozen=True, slots=True)
class ServedNames:
    """Names under which the one model of this server answers."""

    served: str
    aliases: frozenset[str]

    @classmethod
    def of(cls, facts: ModelFacts, configured: str | None) -> "ServedNames":
        served = configured or facts.name
        base = facts.name.rsplit("/", 1)[-1]
        return cls(served, frozenset({served, served.rsplit("/", 1)[-1], facts.name, base, "default"}))

    def check(self, name: str | None) -> None:
        """Raises UnknownModel unless the name is ours. No name means the served one. Never used as a path."""
        if name is not None and name not in self.aliases:
            raise UnknownModel(f"The model `{shown(name)}` does not exist.", param="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One API call, whole: ``requests[i]`` becomes choice ``i``."""

    envelope: Envelope
    dialect: Dialect
    requests: tuple[Generate, ...]
    choices_per_prompt: int
    is_stream: bool
    include_usage: bool
    continuous_usage: bool


def completion_call(body: CompletionBody, names: ServedNames, facts: ModelFacts, caller: Caller) -> Call:
    """Raises InvalidRequest or UnknownModel."""
    n = body.n or 1
    if body.suffix:
        raise InvalidRequest("`suffix` is not supported.", param="suffix")
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequest("`best_of` is only supported if it equals `n`.", param="best_of")
    wants_prompt = bool(body.echo)
    max_tokens = body.max_tokens or max(COMPLETION_MAX_TOKENS, body.min_tokens or 0)
    sampling = _sampling(body, facts, max_tokens=max_tokens, logprobs=body.logprobs, echo=wants_prompt)
    add_special = body.add_special_tokens is not False
    common = {"param": "prompt", "echo": wants_prompt, "add_special_tokens": add_special}
    dialect = CompletionDialect(wants_logprobs=body.logprobs is not None)
    return _call(body, names, caller, dialect, completion_prompts(body), sampling, common)


def chat_call(body: ChatBody, names: ServedNames, facts: ModelFacts, caller: Caller) -> Call:
    """Raises InvalidRequest or UnknownModel."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("Tool calls are not supported yet.", param="tool_choice")
    if body.functions:
        raise InvalidRequest("Function calls are not supported yet.", param="functions")
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, facts, max_tokens=body.max_completion_tokens or body.max_tokens, logprobs=wanted, echo=False)
    prompt = chat_prompt(body.messages, body)
    return _call(body, names, caller, ChatDialect(bool(body.logprobs)), [prompt], sampling, {"param": "messages"})


def completion_prompts(body: CompletionBody) -> list[Prompt]:
    """One string, many strings, one list of ids, many lists of ids: never a mixture."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [TokenPrompt(tuple(item for item in prompt if isinstance(item, int)))]
    if kinds == {str}:
        return [TextPrompt(item) for item in prompt if isinstance(item, str)]
    if kinds == {list}:
        return [TokenPrompt(tuple(item)) for item in prompt if isinstance(item, list)]
    raise InvalidRequest("`prompt` must be one string, strings, token ids, or lists of token ids.", param="prompt")


def pin_prompt(body: PinBody) -> Prompt:
    """Raises InvalidRequest unless there is exactly one prompt."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either `prompt` or `messages`.", param="prompt")
    if body.messages is not None:
        return chat_prompt(body.messages, body)
    return TokenPrompt(tuple(body.prompt)) if isinstance(body.prompt, list) else TextPrompt(body.prompt or "")


def chat_prompt(messages: Sequence[Message], fields: ChatBody | TokenizeBody | PinBody) -> ChatPrompt:
    """Messages as the template sees them."""
    if fields.chat_template is not None:
        raise InvalidRequest("This server does not take chat templates from requests.", param="chat_template")
    if fields.tools:
        raise InvalidRequest("Tools are not supported yet.", param="tools")
    arguments = fields.chat_template_kwargs or {}
    if not _RESERVED.isdisjoint(arguments):
        raise InvalidRequest("`chat_template_kwargs` has a reserved name.", param="chat_template_kwargs")
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude each other.", param="continue_final_message"
        )
    return ChatPrompt(
        messages=tuple(_message(index, message) for index, message in enumerate(messages)),
        add_generation_prompt=fields.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        template_arguments=arguments,
    )


def _message(index: int, message: Message) -> dict[str, object]:
    """Null fields are left out; a message without content has an empty one, because templates concatenate it."""
    where = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"`{where}.role` is not a known role.", param=f"{where}.role")
    if message.content is None and role not in _SILENT_ROLES:
        raise InvalidRequest(f"`{where}.content` is required.", param=f"{where}.content")
    content = message.content if isinstance(message.content, str) else _joined(where, message.content or ())
    extras = {
        "name": message.name,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    return {"role": role, "content": content} | {key: value for key, value in extras.items() if value is not None}


def _joined(where: str, parts: Sequence[ContentPart]) -> str:
    for index, part in enumerate(parts):
        if part.type not in _TEXT_PARTS or part.text is None:
            place = f"{where}.content[{index}]"
            raise InvalidRequest(f"`{place}` is not a text part; this model reads text only.", param=place)
    return "\n".join(part.text or "" for part in parts)


def _sampling(
    body: SamplingFields, facts: ModelFacts, *, max_tokens: int | None, logprobs: int | None, echo: bool
) -> SamplingParams:
    _refuse_constraints(body)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=_default(body.temperature, 1.0),
        top_k=body.top_k or 0,
        top_p=_default(body.top_p, 1.0),
        min_p=_default(body.min_p, 0.0),
        repetition_penalty=_default(body.repetition_penalty, 1.0),
        presence_penalty=_default(body.presence_penalty, 0.0),
        frequency_penalty=_default(body.frequency_penalty, 0.0),
        logit_bias=_biases(body.logit_bias or {}),
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    check_sampling(params, vocab_size=facts.vocab_size, context_length=facts.context_length)
    return params


def _refuse_constraints(body: SamplingFields) -> None:
    wanted = body.response_format
    if wanted is not None and not (isinstance(wanted, dict) and wanted.get("type") == "text"):
        raise InvalidRequest("Only `response_format` of type text is supported yet.", param="response_format")
    for name in _CONSTRAINTS:
        if getattr(body, name) is not None:
            raise InvalidRequest("Structured output is not supported yet.", param=name)
    if body.use_beam_search:
        raise InvalidRequest("Beam search is not supported.", param="use_beam_search")


def _biases(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if not all(_TOKEN_KEY.fullmatch(key) for key in biases):
        raise InvalidRequest("`logit_bias` has a key that is not a token id.", param="logit_bias")
    tokens = {int(key): bias for key, bias in biases.items()}
    if len(tokens) != len(biases):
        raise InvalidRequest("`logit_bias` names a token twice.", param="logit_bias")
    return tuple(tokens.items())


def _call(
    body: SamplingFields,
    names: ServedNames,
    caller: Caller,
    dialect: Dialect,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    common: dict[str, object],
) -> Call:
    names.check(body.model)
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream` to be true.", param="stream_options")
    n = body.n or 1
    if n * len(prompts) > MAX_SEQUENCES:
        raise InvalidRequest(f"`n` times the number of prompts may be {MAX_SEQUENCES} at most.", param="n")
    call_id = dialect.id_prefix + secrets.token_hex(16)
    common = common | {
        "tenant": caller.tenant,
        "salt": body.cache_salt or body.prompt_cache_key or "",
        "user": body.user or "",
        "timeout_s": body.timeout,
        "priority": body.priority or 0,
        "group": call_id if n * len(prompts) > 1 else "",
        "skip_special_tokens": body.skip_special_tokens is not False,
        "include_stop": bool(body.include_stop_str_in_output),
    }
    variants = [_variant(sampling, index) for index in range(n)]
    pairs = [(prompt, variant) for prompt in prompts for variant in variants]
    return Call(
        envelope=Envelope(id=call_id, created=int(time.time()), model=names.served),
        dialect=dialect,
        requests=tuple(_request(f"{call_id}-{index}", *pair, common) for index, pair in enumerate(pairs)),
        choices_per_prompt=n,
        is_stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )


def _variant(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choices of one seeded call differ, and each can be had again."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & _SEED_MASK)


def _request(request_id: str, prompt: Prompt, sampling: SamplingParams, common: dict[str, object]) -> Generate:
    return Generate(request_id=request_id, prompt=prompt, sampling=sampling, **common)  # type: ignore[arg-type]


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
