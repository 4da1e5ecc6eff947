"""The three agents, one file each: prompt template, parser of the answer, and the answer a perfect agent
would give.

Every agent speaks two styles: "chat" for an instruction-tuned model (whole prompts, fenced code, tool calls)
    and "compact"
for a small model trained from scratch, where each token counts. Parsers never raise: what they can't read
they say.
"""
