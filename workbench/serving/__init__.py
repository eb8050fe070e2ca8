"""Several models behind one HTTP server: OpenAI's and vLLM's endpoints, engines of one arena."""
