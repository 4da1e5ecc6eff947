"""Is a skill worth having? The rules are the sandbox's, which decides by them for other projects too: see `sandbox.verification`."""

from sandbox.verification import FAILED_RANK, Decision, PaperRule, SequentialTest, VerdictView, score, sign_patterns, speedup_of

__all__ = ["FAILED_RANK", "Decision", "PaperRule", "SequentialTest", "VerdictView", "score", "sign_patterns", "speedup_of"]
