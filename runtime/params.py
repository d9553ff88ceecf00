"""What a request may ask of the sampler. Values are checked here, once, for every door."""

from __future__ import annotations

import msgspec

from runtime.errors import InvalidRequest

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 64
MAX_LOGIT_BIAS = 4096
MAX_LOGPROB_IDS = 256
MAX_N = 128


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one generation, named as the OpenAI and SGLang APIs name them.

    `temperature` 0 is greedy. `top_k` 0 (or -1) is off. `seed` fixes the random stream of the request,
    whatever it is batched with. `logprobs` asks for the chosen token's log-probability (of the model's
    own distribution: before penalties, mask and temperature), `top_logprobs` for that many alternatives,
    `logprob_ids` for the log-probabilities of these very tokens at every place, scored prompt tokens included.
    """

    max_tokens: int | None = None  # None: up to the end of the context; 0: prefill and cache only
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()  # expressions that stop as strings do, at the first end of a match
    ignore_eos: bool = False
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()

    @property
    def needs_last_token(self) -> bool:
        """True when sampling depends on the values of earlier output tokens (so it waits for commit)."""
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest, naming the parameter and its limit, for any value out of range."""
        _check_int("max_tokens", self.max_tokens, 0, 2**31 - 1, optional=True)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _check_int("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str", "skip_special_tokens", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false; got {shown(getattr(self, name))}.", param=name)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs goes with logprobs=true only.", param="top_logprobs")
        if self.logprob_ids:
            self._validate_logprob_ids(vocab_size)
        self._validate_bias(vocab_size)
        self._validate_stops(vocab_size)

    def _validate_regexes(self) -> None:
        from runtime.text.stop_regex import automaton

        if not isinstance(self.stop_regex, tuple) or not all(isinstance(text, str) for text in self.stop_regex):
            raise InvalidRequest("stop_regex must be an expression or a list of them.", param="stop_regex")
        if len(self.stop_regex) > MAX_STOPS:
            raise InvalidRequest(f"At most {MAX_STOPS} expressions may stop an answer.", param="stop_regex")
        automaton(tuple(dict.fromkeys(self.stop)), self.stop_regex)

    def _validate_logprob_ids(self, vocab_size: int) -> None:
        if not isinstance(self.logprob_ids, tuple) or len(self.logprob_ids) > MAX_LOGPROB_IDS:
            raise InvalidRequest(f"logprob_ids must be at most {MAX_LOGPROB_IDS} token ids.", param="logprob_ids")
        if not self.logprobs:
            raise InvalidRequest("logprob_ids goes with logprobs=true only.", param="logprob_ids")
        for token in self.logprob_ids:
            _check_token("logprob_ids", token, vocab_size)

    def _validate_bias(self, vocab_size: int) -> None:
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest("logit_bias must map token ids to numbers.", param="logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed.",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _check_token("logit_bias", token, vocab_size)
            _check_float("logit_bias", bias, -100.0, 100.0)

    def _validate_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed.", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"Each stop must be a string of 1 to {MAX_STOP_CHARS} characters.", param="stop")
            if not is_text(text):
                raise InvalidRequest("A stop holds half a surrogate pair, which is no character.", param="stop")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOPS} are allowed.",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _check_token("stop_token_ids", token, vocab_size)
        if self.stop_regex:
            self._validate_regexes()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not _is_int(value) or not low <= value <= high:  # type: ignore[operator]
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}; got {shown(value)}.", param=name)


def _check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, float) or _is_int(value)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        bound = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be a finite number {bound}; got {shown(value)}.", param=name)


def _check_token(name: str, token: object, vocab_size: int) -> None:
    if not _is_int(token) or not 0 <= token < vocab_size:  # type: ignore[operator]
        raise InvalidRequest(
            f"{name} names token {shown(token)}; the vocabulary has ids 0 to {vocab_size - 1}.", param=name
        )


def is_text(text: str) -> bool:
    """False for a string with half a surrogate pair: it has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """A value as an error message quotes it: short, whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        text = "a number too long to write"
    return text if len(text) <= 80 else text[:77] + "..."
