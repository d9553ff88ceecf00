"""What every endpoint is given: the generator and all that is chosen once at start."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from runtime.config import EngineConfig, ServerConfig
from runtime.errors import InvalidRequest, NotFound
from runtime.generate import Generator
from runtime.messages import NamespaceKey
from runtime.serve.history import AnswerHistory
from runtime.serve.live import LiveIds
from runtime.serve.metrics import Metrics
from runtime.serve.stats import LatestNumbers
from runtime.serve.store import ResponseStore
from runtime.step import ModelSpec
from runtime.text.chat import ChatRenderer
from runtime.text.parsers.choose import ToolFamily, choose_reasoning, choose_tools, mismatch
from runtime.text.parsers.reasoning import Start, ThinkTags, thinking_tokens
from runtime.text.tokenizer import Tokenizer

log = logging.getLogger("ramet.serve")


class Pool(Protocol):
    """The KV pool of the running scheduler."""

    @property
    def n_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a digest of the API key, "" where none is needed. Callers do not share cached prefixes."""

    digest: str = ""

    def namespace(self, salt: str | None = None) -> NamespaceKey:
        """The namespace of a request with the client's own `cache_salt`."""
        return NamespaceKey(salt=f"{self.digest}/{salt or ''}" if self.digest or salt else "")

    @classmethod
    def of_key(cls, key: str) -> Caller:
        return cls(hashlib.sha256(key.encode()).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class Serving:
    """One served model. Immutable, but for the bounded stores it holds."""

    generator: Generator
    tokenizer: Tokenizer
    spec: ModelSpec
    engine: EngineConfig
    server: ServerConfig
    pool: Pool
    renderer: ChatRenderer
    tool_family: ToolFamily
    think: ThinkTags | None
    metrics: Metrics
    store: ResponseStore
    history: AnswerHistory
    live: LiveIds = field(default_factory=LiveIds)
    latest: LatestNumbers = field(default_factory=LatestNumbers)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def served_name(self) -> str:
        return self.engine.served_model_name or self.spec.name

    @property
    def context_length(self) -> int:
        """Longest prompt + answer, in tokens."""
        pool_tokens = self.pool.n_pages * self.pool.page_size
        return min(self.spec.context_length, self.engine.context_length or self.spec.context_length, pool_tokens)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises NotFound for a model that is not served here."""
        if name is None or name == "":
            return self.served_name
        if name in (self.served_name, self.spec.name, self.spec.path, self.engine.model, "default"):
            return name
        raise NotFound(
            f"The model {name!r:.120} does not exist here; this server has {self.served_name!r}.",
            param="model",
            code="model_not_found",
        )

    def n_thought(self, token_ids: Sequence[int], start: Start) -> int:
        """How many tokens of an answer that begins like `start` are thought."""
        if self.think is None:
            return 0
        pieces = self.tokenizer.token_bytes
        return thinking_tokens((pieces[i] for i in token_ids if i < len(pieces)), self.think, start)

    def check_batch(self, n_prompts: int, n: int | None) -> int:
        """`n` with its default; refuses more answers in one request than the server allows."""
        count = 1 if n is None else n
        if count < 1:
            raise InvalidRequest(f"n must be at least 1; got {count}.", param="n")
        if n_prompts * count > self.server.max_batch:
            raise InvalidRequest(
                f"This request asks for {n_prompts * count} answers; at most {self.server.max_batch} are allowed.",
                param="n" if count > 1 else "prompt",
            )
        return count


def make_serving(generator: Generator, engine: EngineConfig, server: ServerConfig, pool: Pool) -> Serving:
    """Choose renderer and parsers for the generator's model. Raises InvalidRequest for unknown parser names."""
    tokenizer = generator.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    source = _template_file(server.chat_template)
    renderer = ChatRenderer(tokenizer, source)
    template = renderer.source
    if (warning := mismatch(server.tool_call_parser, template, renderer.knows_tools)) is not None:
        log.warning(warning)
    return Serving(
        generator=generator,
        tokenizer=tokenizer,
        spec=generator.spec,
        engine=engine,
        server=server,
        pool=pool,
        renderer=renderer,
        tool_family=choose_tools(server.tool_call_parser, template, renderer.knows_tools),
        think=choose_reasoning(server.reasoning_parser, template),
        metrics=Metrics(engine.served_model_name or generator.spec.name),
        store=ResponseStore(server.response_store),
        history=AnswerHistory([tokenizer.decode([i], skip_special=False) for i in generator.spec.eos_ids]),
    )


def _template_file(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text()
    except OSError as error:
        raise InvalidRequest(f"The chat template {path} cannot be read: {error}.", param="chat_template") from error
