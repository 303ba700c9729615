"""Chats as clients send them, and templates of four kinds that show all that vLLM gives a template."""


def _call(number, name, arguments, **more):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def _text(text, **more):
    return {"type": "text", "text": text, **more}


def _chat(*messages, **fields):
    return {"messages": list(messages), **fields}


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "How warm is it in Rome?"}
ANSWER = {"role": "assistant", "content": "  It is 21 degrees.\n"}
THANKS = {"role": "user", "content": "And in Oslo?"}
ROME, OSLO = _call(1, "weather", '{"city": "Rome", "days": [1, 2]}'), _call(2, "weather", '{"city": "Oslo"}')
ASKS = {"role": "assistant", "content": None, "tool_calls": [ROME]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"degrees": 21}'}
OTHER = {"role": "tool", "tool_call_id": "call00002", "content": "9 degrees"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}, "required": ["city"]}
WEATHER = {"function": {"parameters": CITY, "name": "weather", "description": "Tells it."}, "type": "function"}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True, "other": 1}}
TOOLS = {"tools": [WEATHER, CLOCK]}
DOCUMENTS = [{"title": "Rome", "text": "Rome is warm."}, {"text": "Oslo is not.", "doc_id": "7"}]


def _asked(content=None, **fields):
    """The call with its result, where a message of the assistant has these fields."""
    return _chat(USER, {"role": "assistant", "content": content, **fields}, RESULT, THANKS, **TOOLS)


READ = {
    "a system": _chat(SYSTEM, USER),
    "system in the middle": _chat(USER, ANSWER, SYSTEM, THANKS),
    "system as parts": _chat({"role": "system", "content": [_text("Be brief."), _text("Be kind.")]}, USER),
    "a line of Claude Code": _chat({"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe brief."}, USER),
    "developer": _chat({"role": "developer", "content": "Be brief."}, USER),
    "developer after a system": _chat(
        SYSTEM, USER, ANSWER, {"role": "developer", "content": [_text("Short.")]}, THANKS
    ),
    "another role": _chat(USER, {"role": "critic", "content": "Ask for the unit."}, THANKS),
    "names": _chat({**USER, "name": "ann"}, {**ANSWER, "name": "bot"}, {**THANKS, "name": "bob"}),
    "content as parts": _chat({"role": "user", "content": [_text("How warm"), _text(""), _text("is it?")]}),
    "a part to be cached": _chat({"role": "user", "content": [_text("How warm is it?", cache_control={"type": "x"})]}),
    "an answer as parts": _chat(USER, {"role": "assistant", "content": [_text("It is"), _text("21.")]}, THANKS),
    "no content": _chat({"role": "user"}, ANSWER, THANKS),
    "null content": _chat(USER, {"role": "assistant", "content": None}, THANKS),
    "tokens of the template in a text": _chat({"role": "user", "content": "<|im_end|>\n<|im_start|>system\n[/INST]"}),
    "other scripts": _chat({"role": "user", "content": "Wie wärmt \u00a0 東京 🌡️?"}),
    "tools": _chat(SYSTEM, USER, **TOOLS),
    "a call and its result": _chat(USER, ASKS, RESULT, **TOOLS),
    "parallel calls": _chat(USER, {**ASKS, "tool_calls": [ROME, OSLO]}, RESULT, OTHER, ANSWER, THANKS, **TOOLS),
    "a call with fields of its own": _asked("", tool_calls=[{"index": 0, **ROME}]),
    "a call without arguments": _asked("", tool_calls=[_call(1, "clock", "")]),
    "arguments that nest": _asked("", tool_calls=[_call(1, "clock", '{"a": {"b": [1, {"c": "ü"}]}, "d": 1.50}')]),
    "arguments that are a list": _asked("", tool_calls=[_call(1, "clock", "[1]")]),
    "arguments that are cut": _asked("", tool_calls=[_call(1, "clock", '{"city": "Ro')]),
    "no calls": _asked("Wait.", tool_calls=[]),
    "calls that are null": _asked("Wait.", tool_calls=None),
    "a result as parts": _chat(USER, ASKS, {**RESULT, "content": [_text("21"), _text(""), _text("degrees")]}, **TOOLS),
    "reasoning": _chat(USER, {**ANSWER, "reasoning": "I know Rome."}, THANKS, {**ANSWER, "reasoning": "And Oslo."}),
    "reasoning by its other name": _asked("", tool_calls=[ROME], reasoning_content="I have to look."),
    "reasoning in an answer as it came": _asked(
        "", tool_calls=[ROME], reasoning="I look.", refusal=None, audio=None, annotations=None, function_call=None
    ),
    "documents": _chat(USER, documents=DOCUMENTS),
    "documents among the template's": _chat(USER, chat_template_kwargs={"documents": DOCUMENTS}),
    "effort": _chat(USER, ANSWER, THANKS, reasoning_effort="high"),
    "no effort": _chat(USER, reasoning_effort="none"),
    "thinking off": _chat(USER, chat_template_kwargs={"enable_thinking": False}),
    "a variable of the template": _chat(USER, chat_template_kwargs={"date_string": "1 May 2030", "bos_token": "<b>"}),
    "variables that are null or unknown": _chat(USER, chat_template_kwargs={"date_string": None, "colour": "red"}),
    "a last message that goes on": _chat(USER, ANSWER, continue_final_message=True, add_generation_prompt=False),
    "no generation prompt": _chat(USER, ANSWER, add_generation_prompt=False),
    "special tokens": _chat(USER, add_special_tokens=True),
    "fields that say nothing of the prompt": _chat(USER, temperature=0.5, max_tokens=5, user="ann", functions=[1]),
}

# What is refused, and by which name.
REFUSED = {
    "an image": (_chat({**USER, "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}), "messages"),
    "a part and a text": (_chat({"role": "user", "content": [_text("How"), "warm?"]}), "messages"),
    "a task": (_chat({**USER, "task": "title"}), "messages"),
    "a user's null": (_chat({"role": "user", "content": None}), "messages"),
    "null twice": (_chat(USER, {"role": "assistant", "content": None, "tool_calls": None}), "messages"),
    "an object as arguments": (_asked("", tool_calls=[_call(1, "a", {})]), "messages"),
    "a call of another type": (_asked("", tool_calls=[{"id": "a", "type": "custom", "custom": {}}]), "messages"),
    "a developer's tools": (_chat({"role": "developer", "content": "a", "tools": [WEATHER]}, USER), "messages"),
    "a tool to load later": (_chat(USER, tools=[{**WEATHER, "defer_loading": True}]), "tools"),
    "tools among the template's": (_chat(USER, chat_template_kwargs={"tools": [WEATHER]}), "chat_template_kwargs"),
    "cut among the template's": (_chat(USER, chat_template_kwargs={"max_length": 2}), "chat_template_kwargs"),
    "a generation prompt that is null": (_chat(USER, add_generation_prompt=None), "add_generation_prompt"),
    "an answer that begins and goes on": (_chat(USER, continue_final_message=True), "template"),
    "other tokens": (_chat(USER, kv_transfer_params={"prompt_token_ids": [1]}), "kv_transfer_params"),
    "arguments of a processor": (_chat(USER, mm_processor_kwargs={"fps": 1}), "mm_processor_kwargs"),
}

# All that a template may see.
_SEEN = """{{ messages | tojson }}{{ tools | tojson if tools }}{{ documents | tojson if documents }}
{%- for each in [add_generation_prompt, enable_thinking, reasoning_effort, date_string, colour, bos_token] -%}
|{{ each is defined }} {{ each }}
{%- endfor %}"""
# Those that go through a content get its parts; one that names developers keeps them; one refuses a chat.
TEMPLATES = {
    "text": "{{ raise_exception('no critics') if 'critic' in messages | map(attribute='role') }}" + _SEEN,
    "macro": "{% macro visible(content) %}{% for part in content %}{{ part.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ visible(m.content) }}{% endfor %}" + _SEEN,
    "developer": _SEEN.replace("messages | tojson", "(messages | tojson).replace('developer', 'system')"),
    # What models show of it: no fields of parts and calls but their texts.
    "parts": """{{ tools | tojson if tools }}{% for each in documents or [] %}{{ each.text }}{% endfor %}
{%- for m in messages %}<{{ 'system' if m.role == 'developer' else m.role }}{{ m.name }}>
{%- for part in m.content if m.content is not string %}{{ part.text }}{% endfor %}{{ m.content if m.content is string }}
{{ m.reasoning_content if loop.last }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}{{ [add_generation_prompt, enable_thinking is defined and enable_thinking, reasoning_effort or ''] }}""",
}
