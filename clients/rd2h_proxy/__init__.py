"""HTTP proxy in front of Prefill and Decode engines: one OpenAI endpoint, two legs a request."""
