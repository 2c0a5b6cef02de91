"""OpenAI's API as data: what requests may say, and what answers look like."""
