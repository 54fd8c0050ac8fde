"""Tool calls and reasoning in a model's own format: read from its output as it comes, enforced by grammars.

``formats`` describes the formats; ``parser`` reads any of them, ``grammar`` writes grammars for any of them.
"""
