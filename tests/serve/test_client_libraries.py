"""Libraries that speak OpenAI's API, each in an environment of its own, against a server whose model calls tools.

Each library gets only the address, as its documentation says for servers that are compatible with OpenAI's.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import environments
from llmconv.export.exporter import export
from tests.builders.embedding_models import save_model, save_modules
from tests.builders.server_process import serving
from tests.builders.talking import save_letters
from tests.builders.worded_models import ANSWER, RESULT, save_scripted

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

START = f"""
import asyncio, json, sys
from enum import Enum
from pydantic import BaseModel, Field
base, embedding = sys.argv[1:]
ANSWER, RESULT = {ANSWER!r}, {RESULT!r}
class Color(Enum):
    RED = "red"
    BLUE = "blue"
class City(BaseModel, extra="forbid"):  # a model of no sense would add keys without end
    "A city."
    name: str = Field(pattern="^[a-z]{{1,5}}$")
    color: Color
    size: int = Field(ge=0, le=99)
def joined(parts):
    return "".join(part or "" for part in parts)
"""

SCRIPTS = {
    "langchain": """
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
given = dict(base_url=base, api_key="none", model="model", max_retries=0)
llm = ChatOpenAI(**given)
assert llm.invoke("Hello").content == ANSWER
assert joined(chunk.content for chunk in llm.stream("Hello")) == ANSWER
assert [one.content for one in llm.batch(["a", "b", "c"])] == [ANSWER] * 3
assert asyncio.run(llm.ainvoke([("system", "Be"), ("user", "Hello")])).usage_metadata["output_tokens"] == 4
@tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
message = llm.bind_tools([add]).invoke("Hello")
assert [one["args"] for one in message.tool_calls] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}], message
streamed = None
for chunk in llm.bind_tools([add]).stream("Hello"):
    streamed = chunk if streamed is None else streamed + chunk
assert [one["args"] for one in streamed.tool_calls] == [one["args"] for one in message.tool_calls]
assert llm.bind_tools([City], tool_choice="any").invoke("Hello").tool_calls[0]["name"] == "City"
for method in ("function_calling", "json_schema"):
    made = ChatOpenAI(**given, max_tokens=300).with_structured_output(City, method=method).invoke("Hello")
    assert isinstance(made, City), method
class Any(BaseModel):
    pass
made = ChatOpenAI(**given, temperature=1, seed=1, max_tokens=50).with_structured_output(
    Any, method="json_mode", include_raw=True).invoke("Hello")
assert made["raw"].content.startswith("{")
state = create_agent(llm, [add]).invoke({"messages": [{"role": "user", "content": "Hello"}]})
assert [one.type for one in state["messages"]] == ["human", "ai", "tool", "tool", "ai"]
assert state["messages"][-1].content == RESULT
assert OpenAI(**given, max_tokens=3, temperature=0).invoke("<|begins|>") == "Grüße, Wörld ✓"
vectors = OpenAIEmbeddings(base_url=embedding, api_key="none", model="small", check_embedding_ctx_length=False)
assert len(vectors.embed_documents(["a", "b"])) == 2 and len(vectors.embed_query("a")) == 64
by_responses = ChatOpenAI(**given, use_responses_api=True)
assert by_responses.invoke("Hello").text == ANSWER
state = create_agent(by_responses, [add]).invoke({"messages": [{"role": "user", "content": "Hello"}]})
assert state["messages"][-1].text == RESULT
assert isinstance(by_responses.with_structured_output(City).invoke("Hello"), City)
""",
    "litellm": """
import litellm
given = dict(model="openai/model", api_base=base, api_key="none", messages=[{"role": "user", "content": "Hello"}])
answer = litellm.completion(**given)
assert answer.choices[0].message.content == ANSWER and answer.usage.total_tokens
assert joined(chunk.choices[0].delta.content for chunk in litellm.completion(**given, stream=True)) == ANSWER
assert asyncio.run(litellm.acompletion(**given)).choices[0].finish_reason == "stop"
add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
first = litellm.completion(**given, tools=[add], tool_choice="auto").choices[0]
assert first.finish_reason == "tool_calls" and len(first.message.tool_calls) == 2
messages = [*given["messages"], first.message.model_dump()]
for one in first.message.tool_calls:
    messages.append({"role": "tool", "name": "add", "tool_call_id": one.id, "content": "5"})
second = litellm.completion(**{**given, "messages": messages}, tools=[add]).choices[0].message
assert second.content == RESULT and second.reasoning_content == "Two and three."
chunks = list(litellm.completion(**given, tools=[add], stream=True, stream_options={"include_usage": True}))
assert len(litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls) == 2
made = litellm.completion(**given, response_format=City, max_tokens=300)
assert City.model_validate_json(made.choices[0].message.content)
vectors = litellm.embedding(model="openai/small", api_base=embedding, api_key="none", input=["a", "b"])
assert len(vectors.data[1]["embedding"]) == 64
assert litellm.text_completion(model="text-completion-openai/model", api_base=base, api_key="none",
                               prompt="<|begins|>", max_tokens=3).choices[0].text == ANSWER
""",
    "instructor": """
import instructor, openai
class Town(BaseModel, extra="forbid"):
    name: str = Field(max_length=4)
    tags: set[Color] = Field(max_length=2)
class Name(BaseModel, extra="forbid"):
    name: str = Field(max_length=4, min_length=1)
tried = []
class Odd(BaseModel, extra="forbid"):
    size: int = Field(ge=0, le=99)
    def model_post_init(self, context):
        tried.append(self.size)
        if len(tried) < 2:
            raise ValueError("once more")
given = dict(model="model", messages=[{"role": "user", "content": "Hello"}], max_tokens=400, temperature=1, seed=2)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=base, api_key="none", max_retries=0), mode=mode)
    if mode is instructor.Mode.JSON:  # its schema is in the prompt alone, which the model does not read
        continue
    assert isinstance(client.chat.completions.create(response_model=City, **given), City)
    tried.clear()
    assert isinstance(client.chat.completions.create(response_model=Odd, max_retries=3, **given), Odd)
    assert len(tried) == 2
    assert list(client.chat.completions.create_partial(response_model=Name, **given))[-1].name
client = instructor.from_openai(openai.OpenAI(base_url=base, api_key="none"), mode=instructor.Mode.TOOLS)
made = client.chat.completions.create(response_model=Town, max_retries=9, **given)
assert isinstance(made.tags, set)  # that they differ is not enforced
""",
    "pydantic-ai": """
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
provider = OpenAIProvider(base_url=base, api_key="none")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("model", provider=provider)
    assert Agent(model).run_sync("Hello").output == ANSWER
    agent = Agent(model, instructions="Be")
    @agent.tool_plain
    def add(a: int, b: int) -> int:
        "Adds."
        return a + b
    run = agent.run_sync("Hello")
    assert run.output == RESULT and run.usage.requests == 2, run
    again = agent.run_sync("Hello", message_history=run.all_messages())
    assert again.output == RESULT
    settings = {"max_tokens": 400}
    for form in (NativeOutput, ToolOutput):
        made = Agent(model, output_type=form(City), model_settings=settings).run_sync("Hello")
        assert isinstance(made.output, City)
    async def stream():
        async with agent.run_stream("Hello") as result:
            return [text async for text in result.stream_text()][-1]
    assert asyncio.run(stream()) == RESULT
""",
    "openai-agents": """
from agents import Agent, AsyncOpenAI, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import ModelSettings, set_tracing_disabled
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=base, api_key="none")
@function_tool
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
async def main():
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="model", openai_client=client)
        assert (await Runner.run(Agent(name="a", instructions="Be", model=model), "Hello")).final_output == ANSWER
        agent = Agent(name="a", instructions="Be", model=model, tools=[add])
        run = await Runner.run(agent, "Hello")
        assert run.final_output == RESULT, run
        again = await Runner.run(agent, [*run.to_input_list(), {"role": "user", "content": "Hello"}])
        assert again.final_output == RESULT
        streamed = Runner.run_streamed(agent, "Hello")
        kinds = [event.type async for event in streamed.stream_events()]
        assert streamed.final_output == RESULT and "run_item_stream_event" in kinds
        settings = ModelSettings(max_tokens=400)
        made = await Runner.run(Agent(name="a", model=model, output_type=City, model_settings=settings), "Hello")
        assert isinstance(made.final_output, City)
asyncio.run(main())
""",
    "llama-index": """
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
given = dict(model="model", api_base=base, api_key="none", context_window=4096, max_retries=0)
llm = OpenAILike(**given, is_chat_model=True, is_function_calling_model=True)
hello = [ChatMessage(role="user", content="Hello")]
assert llm.chat(hello).message.content == ANSWER
assert joined(part.delta for part in llm.stream_chat(hello)) == ANSWER
assert OpenAILike(**given, max_tokens=3).complete("<|begins|>").text == ANSWER
assert joined(part.delta for part in OpenAILike(**given, max_tokens=3).stream_complete("<|begins|>")) == ANSWER
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
tool = FunctionTool.from_defaults(add)
calls = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], user_msg="Hello", allow_parallel_tool_calls=True))
assert [call.tool_kwargs for call in calls] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
async def main():
    return await FunctionAgent(tools=[tool], llm=llm).run(user_msg="Hello")
assert str(asyncio.run(main())) == RESULT
made = OpenAILike(**given, max_tokens=400, is_chat_model=True, should_use_structured_outputs=True)
assert isinstance(made.as_structured_llm(City).chat(hello).raw, City)
vectors = OpenAILikeEmbedding(model_name="small", api_base=embedding, api_key="none")
assert len(vectors.get_text_embedding("a")) == 64 and len(vectors.get_text_embedding_batch(["a", "b"])) == 2
""",
    "llm": """
import os, pathlib, tempfile
home = pathlib.Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(home)
(home / "extra-openai-models.yaml").write_text(json.dumps([{
    "model_id": "mine", "model_name": "model", "api_base": base, "supports_tools": True, "supports_schema": True}]))
import llm
model = llm.get_model("mine")
assert model.prompt("Hello", key="none").text() == ANSWER
assert model.prompt("Hello", key="none", stream=False).text() == ANSWER
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
assert model.chain("Hello", key="none", tools=[add]).text().endswith(RESULT)
assert City.model_validate_json(model.prompt("Hello", key="none", schema=City, max_tokens=400).text())
""",
}

NODE = """
import assert from 'node:assert';
import OpenAI from 'openai';
import { generateObject, generateText, stepCountIs, streamText, tool, embed } from 'ai';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { z } from 'zod';
const [base, embedding] = process.argv.slice(1);
const ANSWER = 'Grüße, Wörld ✓', RESULT = 'The sum is 5.';
const client = new OpenAI({ baseURL: base, apiKey: 'none' });
const messages = [{ role: 'user', content: 'Hello' }];
const whole = await client.chat.completions.create({ model: 'model', messages });
assert.equal(whole.choices[0].message.content, ANSWER);
let text = '';
for await (const chunk of await client.chat.completions.create({ model: 'model', messages, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? '';
assert.equal(text, ANSWER);
const parameters = { type: 'object', properties: { a: { type: 'integer' }, b: { type: 'integer' } } };
const run = client.chat.completions.runTools({ model: 'model', messages, tools: [{ type: 'function', function: {
  name: 'add', parameters, parse: JSON.parse, function: ({ a, b }) => `${a + b}` } }] });
assert.equal(await run.finalContent(), RESULT);
assert.equal((await client.responses.create({ model: 'model', input: 'Hello' })).output_text, ANSWER);
const other = new OpenAI({ baseURL: embedding, apiKey: 'none' });
const vectors = await other.embeddings.create({ model: 'small', input: 'a' });
assert.equal(vectors.data[0].embedding.length, 64);
const given = { name: 'mine', apiKey: 'none', supportsStructuredOutputs: true, includeUsage: true };
const compatible = createOpenAICompatible({ ...given, baseURL: base });
const own = createOpenAI({ baseURL: base, apiKey: 'none' });
const add = tool({ inputSchema: z.object({ a: z.number(), b: z.number() }), execute: async ({ a, b }) => a + b });
const schema = z.object({ name: z.string().max(4), color: z.enum(['red', 'blue']) });
const models = { compatible: compatible('model'), chat: own.chat('model'), responses: own('model') };
for (const [name, model] of Object.entries(models)) {
  assert.equal((await generateText({ model, prompt: 'Hello' })).text, ANSWER, name);
  const options = { model, prompt: 'Hello', tools: { add }, stopWhen: stepCountIs(3) };
  assert.equal((await generateText(options)).text, RESULT, name);
  const stream = streamText(options);
  let made = '';
  for await (const part of stream.fullStream) {
    assert.notEqual(part.type, 'error', `${name}: ${part.error}`);
    if (part.type === 'text-delta') made += part.text;
  }
  assert.equal(made, RESULT, name);
  assert.ok((await stream.totalUsage).inputTokens > 0, name);
  const { object } = await generateObject({ model, schema, prompt: 'Hello', maxOutputTokens: 200 });
  assert.ok(['red', 'blue'].includes(object.color), name);
}
const small = createOpenAICompatible({ ...given, baseURL: embedding }).embeddingModel('small');
const vector = await embed({ model: small, value: 'a' });
assert.equal(vector.embedding.length, 64);
"""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Those of a model that calls tools, `model`, and of an embedding model, `small`."""
    root = tmp_path_factory.mktemp("libraries")
    folder = save_scripted(root / "model")
    small = save_letters(save_modules(save_model(root / "small", "qwen3")))
    export(small, task="embed")
    with serving(folder) as texts, serving(small) as vectors:
        yield [f"{one.address}/v1" for one in (texts, vectors)]


def run(command: list[str], home: Path, folder: Path) -> None:
    """Runs a script that fails where the library does."""
    if not (home / "complete").exists():
        pytest.skip(f"`make clients` makes the environment {home.name}")
    environment = {**os.environ, "OPENAI_API_KEY": "none", "HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment |= {
        "DO_NOT_TRACK": "1",
        "LANGSMITH_TRACING": "false",
        "HF_HUB_OFFLINE": "1",
        "AI_SDK_LOG_WARNINGS": "false",
    }
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_library_of_python(addresses: list[str], name: str, tmp_path: Path) -> None:
    home = ROOT / environments.folder(name)
    run([str(home / "bin/python"), "-c", START + SCRIPTS[name], *addresses], home, tmp_path)


def test_the_libraries_of_javascript(addresses: list[str], tmp_path: Path) -> None:
    home = ROOT / environments.folder("ai-sdk")
    run(["node", "--input-type=module", "-e", NODE, *addresses], home, tmp_path)
