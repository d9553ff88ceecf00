"""Append-only history: what the model wrote goes back into the prompt, id for id."""

from __future__ import annotations

import json

from runtime.messages import unpack_ids
from runtime.serve.history import AnswerHistory
from tests.serve.scripted import EOS, Served, serve

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


class TestAnswerHistory:
    def test_kept_ids_replace_the_text_they_stand_for(self):
        history = AnswerHistory(["<end>"])
        history.keep("", "Q: hi A: ho", (1, 2, 3))
        text = "Q: hi A: ho<end>\nQ: more"
        assert history.encode("", text, encode) == [1, 2, 3, *encode("<end>\nQ: more")]
        assert history.n_spliced == 1

    def test_the_longest_conversation_wins(self):
        history = AnswerHistory(["<end>"])
        history.keep("", "a", (1,))
        history.keep("", "a<end>b", (1, 9, 2))
        assert history.encode("", "a<end>b<end>c", encode) == [1, 9, 2, *encode("<end>c")]

    def test_other_text_other_callers_and_other_ends_are_encoded(self):
        history = AnswerHistory(["<end>"])
        history.keep("me", "a", (1,))
        for owner, text in (("me", "b<end>"), ("you", "a<end>"), ("me", "ab"), ("me", "a")):
            assert history.encode(owner, text, encode) == encode(text)

    def test_it_is_bounded_by_answers_and_by_tokens(self):
        history = AnswerHistory(["<end>"], max_answers=3, max_tokens=100)
        for i in range(10):
            history.keep("", f"a{i}", (i,))
        assert len(history) == 3
        history.keep("", "long", tuple(range(101)))
        assert len(history) == 0


def prompt_ids(served: Served) -> list[int]:
    return unpack_ids(served.client.submits[-1].tokens).tolist()


async def test_the_next_prompt_begins_with_the_last_one_and_its_answer_id_for_id():
    odd = serve([b"ab", b"c"])  # the ids are what was generated, however the text would be tokenised again
    messages = list(USER)
    async with odd.http() as http:
        for turn in range(3):
            answer = (await http.post("/v1/chat/completions", json={"messages": messages})).json()
            before = [*prompt_ids(odd), *b"abc"]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
            await http.post("/v1/chat/completions", json={"messages": messages})
            assert prompt_ids(odd)[: len(before)] == before
            assert prompt_ids(odd)[len(before)] == EOS


async def test_calls_go_back_as_the_model_wrote_them():
    written = '<tool_call>{"arguments":   {"a": 1},\n "name": "now"}</tool_call>'
    served = serve(["Look. ", written])
    async with served.http() as http:
        message = (await http.post("/v1/chat/completions", json={"messages": USER, "tools": [TOOL]})).json()["choices"][
            0
        ]["message"]
        before = [*prompt_ids(served), *f"Look. {written}".encode()]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12"}
        await http.post("/v1/chat/completions", json={"messages": [*USER, message, result], "tools": [TOOL]})
        assert prompt_ids(served)[: len(before)] == before
        changed = json.loads(json.dumps(message))
        changed["tool_calls"][0]["function"]["arguments"] = '{"a": 2}'
        await http.post("/v1/chat/completions", json={"messages": [*USER, changed, result], "tools": [TOOL]})
        assert prompt_ids(served)[: len(before)] != before
        assert b'{"a": 2}' in bytes(i for i in prompt_ids(served) if i < 256)


async def test_callers_do_not_see_each_others_answers():
    from runtime.config import ServerConfig

    served = serve(["abc"], server=ServerConfig(api_key="one,two"))
    async with served.http() as http:
        for key in ("one", "two"):
            body = {"messages": [*USER, {"role": "assistant", "content": "abc"}, *USER]}
            await http.post("/v1/chat/completions", json={"messages": USER}, headers={"x-api-key": key})
            await http.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
    salts = {submit.namespace.salt for submit in served.client.submits}
    assert len(salts) == 2
