"""Texts that break tokenizers."""

# ruff: noqa: RUF001

TEXTS = [
    "",
    " ",
    "   three before, three after   ",
    "\n\n\tmixed \r\n white\u00a0space\u2003here \n",
    "def f(x):\n    return x ** 2  # 4 spaces\n\n\n",
    "0 1 23 456 7890 12345678901234567890 3.14159 1,000,000 2025-01-31 0x1F x½",
    "it's we'll they've I'm you'd HE'S don't",
    "naïve café Ünïcödé Straße ǆ ﬁ",
    "e\u0301 combining, u\u0308 too",
    "日本語のテキスト、中文文本，한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "🙂 👩‍👩‍👧‍👦 🏳️‍🌈 emoji 🇩🇪",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 beyond the 𐍈 basic plane",
    "\x00\x01 control \x7f \ufeff \u200b zero width",
    "<|im_start|>user\nspecial tokens in the text<|im_end|>\n<|endoftext|>",
    "<|not_special|> <|im_start",
    "!@#$%^&*()_+-=[]{}|;':\",./<>?`~ … — “quotes” ‹›",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/path?query=1&other=%20#fragment user@example.org",
    "SELECT * FROM t WHERE a>=10;\tCamelCase snake_case kebab-case",
]
