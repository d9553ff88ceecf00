"""Agent frameworks, unmodified, against a scripted server: `make clients` installs them and runs these."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import agents
import dspy
import instructor
import langchain_openai
import litellm
import openai
import pydantic_ai
import pytest
from pydantic import BaseModel

from runtime.messages import Submit, unpack_ids
from tests.serve.running import running
from tests.serve.scripted import Served, serve

USER = [{"role": "user", "content": "weather in Rome?"}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class City(BaseModel):
    city: str


def agent_script(submit: Submit) -> Sequence[str]:
    """Calls the tool first; once its result is in the prompt, answers. Keeps promised forms."""
    prompt = bytes(int(i) for i in unpack_ids(submit.tokens) if i < 256).decode("utf-8", "replace")
    if submit.grammar is not None and submit.grammar.kind == "json_schema":
        schema = json.loads(submit.grammar.spec)
        if schema.get("type") == "array":
            items = schema["items"].get("anyOf", [schema["items"]])
            name = items[-1]["properties"]["name"]["const"]
            return [json.dumps([{"name": name, "arguments": {"city": "Rome"}}])]
        return ['{"city":', ' "Rome"}']
    if submit.grammar is not None and submit.grammar.kind == "json_object":
        return ['{"city": "Rome"}']
    if "get_weather" in prompt and "18C" not in prompt:
        return list(CALL)
    return ["It is ", "18C."]


@pytest.fixture
def served() -> Served:
    return serve(script=agent_script)


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    with running(served) as base:
        yield base


class TestLiteLLM:
    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    def test_completion_and_streaming(self, url, provider):
        common = {"model": f"{provider}/fake", "api_base": f"{url}/v1", "api_key": "x", "messages": USER}
        whole = litellm.completion(**common)
        assert whole.choices[0].message.content == "It is 18C."
        assert whole.usage.prompt_tokens_details.cached_tokens > 0
        chunks = list(litellm.completion(**common, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "It is 18C."
        calls = litellm.completion(**common, tools=[TOOL]).choices[0].message.tool_calls
        assert json.loads(calls[0].function.arguments) == {"city": "Rome"}

    def test_a_prompt_too_long_is_classified(self, url):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(
                model="openai/fake",
                api_base=f"{url}/v1",
                api_key="x",
                messages=[{"role": "user", "content": "x" * 9000}],
            )

    def test_the_anthropic_provider(self, url):
        answer = litellm.completion(
            model="anthropic/fake", api_base=url, api_key="x", messages=USER, tools=[TOOL], max_tokens=400
        )
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}


class TestLangChain:
    def chat(self, url: str):
        return langchain_openai.ChatOpenAI(base_url=f"{url}/v1", api_key="x", model="fake", max_retries=0)

    def test_invoke_stream_and_usage(self, url):
        assert self.chat(url).invoke("hi").content == "It is 18C."
        chunks = list(self.chat(url).stream("hi", stream_usage=True))
        assert "".join(c.content for c in chunks) == "It is 18C."
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert total.usage_metadata["input_token_details"]["cache_read"] > 0

    def test_tools_whole_and_streamed(self, url):
        bound = self.chat(url).bind_tools([TOOL])
        assert bound.invoke("weather?").tool_calls[0]["args"] == {"city": "Rome"}
        total = None
        for chunk in bound.stream("weather?"):
            total = chunk if total is None else total + chunk
        assert total.tool_calls[0]["args"] == {"city": "Rome"}

    @pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
    def test_structured_output(self, url, method):
        assert self.chat(url).with_structured_output(City, method=method).invoke("a city as json").city == "Rome"

    def test_text_completions(self, url):
        llm = langchain_openai.OpenAI(base_url=f"{url}/v1", api_key="x", model="fake", max_retries=0)
        assert llm.batch(["a", "b"]) == ["It is 18C."] * 2


class TestInstructor:
    @pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
    def test_response_models(self, url, mode):
        client = instructor.from_openai(
            openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0), mode=instructor.Mode[mode]
        )
        city = client.chat.completions.create(model="fake", response_model=City, messages=USER, max_retries=0)
        assert city.city == "Rome"


class TestPydanticAI:
    def model(self, url: str):
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        return OpenAIChatModel("fake", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))

    def test_an_agent_calls_its_tool_and_answers(self, url):
        agent = pydantic_ai.Agent(self.model(url))

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """Weather of a city."""
            return f"18C in {city}"

        result = agent.run_sync("weather in Rome?")
        assert result.output == "It is 18C."

    def test_typed_output(self, url):
        assert pydantic_ai.Agent(self.model(url), output_type=City).run_sync("a city").output == City(city="Rome")
        native = pydantic_ai.NativeOutput(City)
        assert pydantic_ai.Agent(self.model(url), output_type=native).run_sync("a city").output == City(city="Rome")

    async def test_streaming(self, url):
        async with pydantic_ai.Agent(self.model(url)).run_stream("hi") as stream:
            assert await stream.get_output() == "It is 18C."


class TestOpenAIAgents:
    @pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_agent_calls_its_tool_and_answers(self, url, kind, stream):
        agents.set_tracing_disabled(True)

        @agents.function_tool
        def get_weather(city: str) -> str:
            """Weather of a city."""
            return f"18C in {city}"

        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            model = getattr(agents, kind)(model="fake", openai_client=client)
            agent = agents.Agent(name="a", instructions="be brief", model=model, tools=[get_weather])
            if not stream:
                assert (await agents.Runner.run(agent, "weather in Rome?")).final_output == "It is 18C."
                return
            run = agents.Runner.run_streamed(agent, "weather in Rome?")
            async for _ in run.stream_events():
                pass
            assert run.final_output == "It is 18C."

    async def test_typed_output(self, url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel(model="fake", openai_client=client)
            agent = agents.Agent(name="a", model=model, output_type=City)
            assert (await agents.Runner.run(agent, "a city")).final_output == City(city="Rome")


class TestDSPy:
    """Its adapters ask in their own notation, so the script answers in that."""

    def predict(self, url: str, adapter: dspy.Adapter, said: str) -> dspy.Prediction:
        lm = dspy.LM("openai/fake", api_base=f"{url}/v1", api_key="x", cache=False, max_tokens=50)
        with dspy.context(lm=lm, adapter=adapter):
            return dspy.Predict("question -> city")(question=said)

    def test_its_adapters_read_our_answers(self):
        for adapter, said in (
            (dspy.ChatAdapter(), "[[ ## city ## ]]\nRome\n\n[[ ## completed ## ]]"),
            (dspy.JSONAdapter(), '{"city": "Rome"}'),
        ):
            with running(serve(list(said))) as url:
                assert self.predict(url, adapter, "capital of Italy?").city == "Rome"
