"""Model folders with a small trained tokenizer, in the families that tests need."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
MARKUP += ["<think>", "</think>"]

TEXT = [
    "the quick brown fox jumps over the lazy dog and asks for the price of an order",
    '{"name": "find", "arguments": {"query": "shoes", "limit": 3}}',
    "system user assistant tool\n# Tools\n<tools>\n</tools>",
]

# As published models: tools in the system message, calls as JSON, results as user messages.
APPENDING_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Puts the number of messages in front of all of them, so every message changes the head.
REWRITING_TEMPLATE = "{{- (messages | length) | string + '\\n' }}" + APPENDING_TEMPLATE

# As published models that think: reasoning stays behind the newest question only.
_THINKING = """\
{%- if m.reasoning_content and loop.index0 > asked.last %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- (m.content or '').lstrip('\\n') }}"""
STRIPPING_TEMPLATE = (
    "{%- set asked = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set asked.last = loop.index0 %}{%- endif %}{%- endfor %}"
    + APPENDING_TEMPLATE.replace(" + (m.content or '') }}", " }}" + _THINKING, 1)
)


def write_model_folder(folder: Path, *, template: str = APPENDING_TEMPLATE, name: str = "") -> Path:
    """A folder with tokenizer.json, its configuration and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens(MARKUP)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}})
    )
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({"_name_or_path": name}))
    return folder
