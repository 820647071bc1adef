"""How much one request may ask for. Bounds of single options are SamplingParams' own."""

MAX_BODY_BYTES = 32 * 2**20
MAX_PROMPTS = 2048  # in one request
MAX_SAMPLES = 8192  # of all its prompts together: each takes memory for all its tokens at once
MAX_STOPS = 64  # OpenAI takes 4, but lm-eval's tasks have more
MAX_STOP_BYTES = 1024  # of one stop string or bad word
MAX_TOP_LOGPROBS = 20
MAX_NAME = 256  # characters of a model's name, a request's id, or a cache salt
