"""From requests to tokens and from tokens to text: chat templates, tokenizers, detokenising, stop strings.
No torch.
"""
