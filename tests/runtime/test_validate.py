"""The door: each bad value is refused by name, each good one passes, and limits follow model and pool."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from runtime.config import EngineConfig
from runtime.errors import ContextLengthExceeded, InvalidRequest
from runtime.execute.fake import fake_spec
from runtime.messages import GrammarSpec, Hints, NamespaceKey, Segment, Submit, pack_ids
from runtime.params import SamplingParams
from runtime.validate import Limits, validate_submit

LIMITS = Limits(vocab_size=64, max_len=32)
GOOD = Submit(rid="a", tokens=pack_ids([5, 6, 7]))
SCORING = SamplingParams(max_tokens=0)


def refused(**changes: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        validate_submit(msgspec.structs.replace(GOOD, **changes), LIMITS, param="prompt")
    return caught.value


def test_a_good_request_passes() -> None:
    validate_submit(GOOD, LIMITS)
    validate_submit(msgspec.structs.replace(GOOD, params=SCORING, scores=((1, 5), (1, 6), (3, 0))), LIMITS)
    hints = Hints(program_id="p", expect_return_s=3, retain_ttl_s=0.5, expected_fanout=4, depth=7)
    validate_submit(
        msgspec.structs.replace(GOOD, hints=hints, timeout_s=5, priority=-3, prompt_logprobs_from=2), LIMITS
    )


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"rid": ""}, "rid"),
        ({"tokens": b""}, "prompt"),
        ({"tokens": b"abc"}, "prompt"),
        ({"tokens": pack_ids([64])}, "prompt"),
        ({"tokens": pack_ids([-1])}, "prompt"),
        ({"params": SamplingParams(top_k=-2)}, "top_k"),
        ({"segments": (Segment(tokens=pack_ids([99]), params=SamplingParams()),)}, "segments"),
        ({"segments": (Segment(tokens=b"", params=SamplingParams(min_p=2.0)),)}, "min_p"),
        ({"segments": (Segment(tokens=b"", params=SamplingParams()),) * 257}, "segments"),
        ({"namespace": NamespaceKey(adapter=-1)}, "adapter"),
        ({"namespace": NamespaceKey(salt="x" * 2000)}, "salt"),
        ({"hints": Hints(expect_return_s=float("nan"))}, "expect_return_s"),
        ({"hints": Hints(expected_fanout=10**9)}, "expected_fanout"),
        ({"hints": Hints(depth=-1)}, "depth"),
        ({"hints": Hints(depth=4097)}, "depth"),
        ({"hints": Hints(depth=True)}, "depth"),
        ({"hints": Hints(depth=1.5)}, "depth"),  # type: ignore[arg-type]
        ({"hints": Hints(depth=None)}, "depth"),  # type: ignore[arg-type]
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"priority": True}, "priority"),
        ({"client": 7}, "client"),
        ({"prompt_logprobs_from": 3}, "prompt_logprobs_from"),
        ({"prompt_logprobs_from": -1}, "prompt_logprobs_from"),
        ({"scores": ((1, 5),)}, "scores"),
        *(
            ({"params": SCORING, "scores": bad}, "scores")
            for bad in (((0, 5),), ((4, 5),), ((3, 64),), ((2, 5), (1, 5)))
        ),
        ({"params": SCORING, "scores": ((1, 5),), "prompt_logprobs_from": 1}, "scores"),
        ({"grammar": GrammarSpec(kind="regex", spec=5)}, "regex"),  # type: ignore[arg-type]
        ({"grammar": GrammarSpec(kind="json_schema", spec='"\ud800"')}, "json_schema"),
    ],
)
def test_each_bad_value_is_named(changes: dict[str, Any], param: str) -> None:
    assert refused(**changes).param == param


@pytest.mark.parametrize(
    ("n", "max_tokens", "fits"),
    [
        (31, None, True),
        (31, 10_000, True),
        (31, 1, True),
        (32, 0, True),
        (32, None, False),
        (32, 1, False),
        (33, 0, False),
    ],
)
def test_the_prompt_must_leave_room_for_one_token(n: int, max_tokens: int | None, fits: bool) -> None:
    submit = msgspec.structs.replace(GOOD, tokens=pack_ids([5] * n), params=SamplingParams(max_tokens=max_tokens))
    if fits:
        validate_submit(submit, LIMITS)
        return
    with pytest.raises(ContextLengthExceeded) as caught:
        validate_submit(submit, LIMITS)
    assert str(n) in str(caught.value)
    assert "32" in str(caught.value)
    assert caught.value.code == "context_length_exceeded"


def test_messages_stay_short_whatever_was_sent() -> None:
    error = refused(params=SamplingParams(logit_bias=dict.fromkeys(range(5000), 1.0)))
    assert len(str(error)) < 300
    assert len(str(refused(timeout_s=float("-inf")))) < 300


def test_limits_are_the_least_of_model_option_and_pool() -> None:
    spec = fake_spec(64, 512)
    assert Limits.of(spec, EngineConfig()).max_len == 512
    assert Limits.of(spec, EngineConfig(context_length=100)).max_len == 100
    assert Limits.of(spec, EngineConfig(), pool_tokens=64).max_len == 64


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str", "skip_special_tokens", "logprobs"])
@pytest.mark.parametrize("value", [1, "yes", None, []])
def test_switches_are_booleans(name, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value}).validate(100)
    assert caught.value.param == name


def test_alternatives_need_logprobs():
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(top_logprobs=2).validate(100)
    assert caught.value.param == "top_logprobs"
    SamplingParams(top_logprobs=2, logprobs=True).validate(100)
