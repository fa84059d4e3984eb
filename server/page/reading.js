// Reading: what text each token of an answer completes, by its UTF-8 bytes.

const isInside = (byte) => (byte & 0xc0) === 0x80; // it goes on with a character

export class Reading {
  constructor() {
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // true keeps U+FEFF
    this.last = null;
  }

  // The next token with its `reads`: a character belongs to the token that completes it. A token
  // whose bytes are not known reads what it alone decodes to.
  // Example: of é in two tokens, the one of bytes [195] reads "" and that of [169] reads "é".
  read(token) {
    if (!token.bytes?.length) return { ...token, reads: token.text };
    if (!isInside(token.bytes[0])) this.finish();
    const bytes = new Uint8Array(token.bytes);
    this.last = { ...token, reads: this.decoder.decode(bytes, { stream: true }) };
    return this.last;
  }

  // A character that nothing completes is U+FFFD, with the last token that has a part of it.
  finish() {
    const lost = this.decoder.decode();
    if (this.last) this.last.reads += lost;
  }
}

// Whether a token only begins or goes on with a character.
export function isPart({ reads, bytes }) {
  return reads === "" && Boolean(bytes?.length);
}
