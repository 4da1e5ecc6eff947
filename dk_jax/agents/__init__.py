"""The three agents, one file each: prompt, parser of the answer, and the perfect agent's answer.

Every agent speaks two styles: "chat" for an instruction-tuned model (whole prompts, fenced code, tool calls)
and "compact" for a small model trained from scratch, where each token counts. Parsers never raise: what they
can't read they say.
"""
