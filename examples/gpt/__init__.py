"""A small GPT on the prose that ships with Python: model, data, text sampling and the closing report."""
