"""Chat templates in the manner of well-known families, for the tiny tokenizer: each has something that others lack."""

from typing import Any

from kit import tiny_tokenizer

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
SPECIALS += ("<start_of_turn>", "<end_of_turn>")

#: ChatML with reasoning: think blocks stand in the answer that comes last and are taken out of earlier ones; tools; a line
#: break behind the end of turn.
CHATML = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% set parts = (message.content or '').split('</think>') %}"
    "{% set thought = message.reasoning_content or (parts[0].split('<think>')[-1].strip() if parts | length > 1 else '') %}"
    "<|im_start|>assistant\n{% if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% for call in message.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The same, and the prompt opens the think block, as models that always reason do.
CHATML_OPENING = CHATML.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
)
#: Headers between special tokens; a tool's result in a role of its own; a call behind a special token; the text is trimmed.
HEADERS = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>\n\n"
    "{% if message.tool_calls %}<|python_tag|>{{ message.tool_calls[0].function | tojson }}"
    "{% else %}{{ message.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
#: Role markers in plain text, no system role, EOS as the end of turn, and no generation prompt at all.
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
#: The assistant is called "model"; the system's text is refused; a line break behind the end of turn.
MODEL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
#: The prompt opens a think block that the rendering of an answer never shows.
HIDING = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}<|user|>{{ message.content }}"
    "{% else %}<|assistant|>{{ message.content.split('</think>')[-1].lstrip() }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
FAMILIES = {"chatml": CHATML, "headers": HEADERS, "instruct": INSTRUCT, "model": MODEL}


def family_tokenizer(template: str, **options: Any) -> Any:
    """The tiny tokenizer with the special tokens of all families and one template."""
    return tiny_tokenizer(template, extra_special_tokens=["<|user|>", "<|assistant|>", "<|end|>", *SPECIALS], **options)
