// Generation: one streamed answer of the server: its text, tokens, times and counts.

import { request, ApiError } from "./api.js";
import { events } from "./stream.js";

export class Generation {
  constructor(body) {
    this.body = {
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      token_info: { rejected: true },
    };
    this.text = "";
    this.tokens = [];
    this.numFirst = 0; // tokens of the first piece: they say nothing about speed
    this.finishReason = null;
    this.usage = null;
    this.stats = null;
    this.startedAt = this.firstAt = this.lastAt = null;
  }

  // Run to the end; `onPiece(text, tokens, rejected)` is called for every chunk that has any.
  // Throws ApiError or Interrupted; a stop by the signal is no error.
  async run(onPiece, signal) {
    this.startedAt = performance.now();
    try {
      const response = await request("/v1/chat/completions", { body: this.body, signal });
      for await (const chunk of events(response)) {
        if (chunk.error) throw new ApiError(500, chunk.error);
        this.usage = chunk.usage ?? this.usage;
        this.stats = chunk.metrics?.speculative_decoding ?? this.stats;
        for (const choice of chunk.choices ?? []) this.#take(choice, onPiece);
      }
    } catch (error) {
      if (!signal?.aborted) throw error;
      this.finishReason = "stopped";
    }
  }

  #take(choice, onPiece) {
    const text = choice.delta?.content ?? "";
    const tokens = choice.token_info ?? [];
    const rejected = choice.rejected_drafts ?? [];
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (!text && tokens.length === 0 && rejected.length === 0) return;
    this.lastAt = performance.now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.numFirst = tokens.length || 1;
    }
    this.text += text;
    this.tokens.push(...tokens);
    onPiece(text, tokens, rejected);
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? (this.tokens.length || null);
  }

  // Tokens per second from the first piece on; of the whole where one piece was all.
  get speed() {
    if (this.numTokens === null || this.firstAt === null) return null;
    const decoded = this.numTokens - this.numFirst;
    if (decoded > 0 && this.lastAt > this.firstAt) {
      return (1000 * decoded) / (this.lastAt - this.firstAt);
    }
    return (1000 * this.numTokens) / (this.lastAt - this.startedAt);
  }

  get firstTokenMs() {
    return this.firstAt === null ? null : this.firstAt - this.startedAt;
  }

  get tokensPerStep() {
    if (this.stats) return this.stats.mean_acceptance_length;
    const steps = new Set(this.tokens.map((token) => token.step)).size;
    return steps ? this.tokens.length / steps : null;
  }

  // Accepted over drafted nodes; null where nothing was drafted.
  get acceptance() {
    return this.stats?.num_draft_tokens ? this.stats.draft_acceptance_rate : null;
  }
}
