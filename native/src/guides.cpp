// Matchers of llguidance's C interface: the masks of a step's rows, and the tokens that were drawn, by all threads at once; and what
// texts become as tokens, which the library asks while it works a mask out. Its functions come from where it is loaded.
#include <string.h>

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "native.h"
#include "tape.h"
#include "team.h"

// What ctypes passes.
struct GuideLibrary {
  int32_t (*compute_mask)(void *matcher);
  const uint32_t *(*get_mask)(void *matcher);
  size_t (*get_mask_byte_size)(const void *matcher);
  int32_t (*consume_tokens)(void *matcher, const uint32_t *tokens, size_t count);
  bool (*is_stopped)(const void *matcher);
  int32_t (*rollback)(void *matcher, size_t count);
};
struct GuideCall {
  const GuideLibrary *library;
  int64_t count, mask_bytes;
  void *const *matchers;                // [count]
  const int64_t *places;                // [count] of its (first) mask
  uint8_t *masks;                       // mask_bytes each
  const int64_t *starts;                // [count + 1] its tokens
  const uint32_t *tokens;
  int64_t *stopped;                     // [count] the result: its end has come, or it has failed
};

// As far as the library's mask goes; tokens behind that may not come. What has failed may have none.
static void guide_mask(const GuideCall &call, void *matcher, int64_t place) {
  uint8_t *mask = call.masks + place * call.mask_bytes;
  const uint32_t *own = call.library->compute_mask(matcher) == 0 ? call.library->get_mask(matcher) : nullptr;
  size_t bytes = own ? call.library->get_mask_byte_size(matcher) : 0, all = (size_t)call.mask_bytes;
  if (bytes > all) bytes = all;
  if (bytes) memcpy(mask, own, bytes);
  memset(mask + bytes, 0, all - bytes);
}

// A few rows are done before another thread has begun.
static int guide_threads(int64_t count, int threads) { return count < 4 ? 1 : threads < count ? threads : (int)count; }

// The masks of the next token of each.
NATIVE_API void guides_fill(const GuideCall *call, int threads) {
  tape_refuse("guides_fill");
  team(guide_threads(call->count, threads), call->count, [&](int64_t i, int) {
    guide_mask(*call, call->matchers[i], call->places[i]);
    call->stopped[i] = call->library->is_stopped(call->matchers[i]);
  });
}

// These tokens come next.
NATIVE_API void guides_accept(const GuideCall *call, int threads) {
  tape_refuse("guides_accept");
  team(guide_threads(call->count, threads), call->count, [&](int64_t i, int) {
    void *matcher = call->matchers[i];
    (void)call->library->consume_tokens(matcher, call->tokens + call->starts[i], call->starts[i + 1] - call->starts[i]);
    call->stopped[i] = call->library->is_stopped(matcher);
  });
}

// Of one matcher the masks before, between and behind tokens, at one place and those behind it; nothing changes. valid: how many of the
// tokens may come. Masks behind the end, and behind one that may not come, are not written.
NATIVE_API void guides_run(const GuideCall *call, int64_t *valid) {
  tape_refuse("guides_run");
  void *matcher = call->matchers[0];
  int64_t count = call->starts[1], num = 0, place = call->places[0];
  guide_mask(*call, matcher, place);
  for (; num < count && !call->library->is_stopped(matcher); num++) {
    const uint32_t token = call->tokens[num], *own = (const uint32_t *)(call->masks + (place + num) * call->mask_bytes);
    if ((int64_t)token >= 8 * call->mask_bytes || !(own[token / 32] >> token % 32 & 1)) break;
    if (call->library->consume_tokens(matcher, &token, 1)) break;
    if (!call->library->is_stopped(matcher)) guide_mask(*call, matcher, place + num + 1);
  }
  if (num) (void)call->library->rollback(matcher, num);
  *valid = num;
  call->stopped[0] = call->library->is_stopped(matcher);
}

typedef size_t (*GuideTokenize)(const void *user, const uint8_t *bytes, size_t length, uint32_t *tokens, size_t room);

// Remembers what texts become as tokens; many threads may ask at once.
struct GuideTexts {
  GuideTokenize ask;
  size_t most, most_bytes;
  std::mutex mutex;
  std::unordered_map<std::string, std::vector<uint32_t>> known;
};

NATIVE_API void guides_texts(GuideTokenize ask, int64_t most, int64_t most_bytes, GuideTexts **texts) {
  *texts = new GuideTexts{ask, (size_t)most, (size_t)most_bytes, {}, {}};
}

NATIVE_API void guides_forget_texts(GuideTexts *texts) { delete texts; }

// Of the type GuideTokenize, for a GuideTexts.
NATIVE_API size_t guides_tokenize(const void *user, const uint8_t *bytes, size_t length, uint32_t *tokens, size_t room) {
  GuideTexts &texts = *(GuideTexts *)user;
  std::string text((const char *)bytes, length);
  {
    std::lock_guard<std::mutex> lock(texts.mutex);
    auto found = texts.known.find(text);
    if (found != texts.known.end()) {
      const std::vector<uint32_t> &known = found->second;
      for (size_t i = 0; i < known.size() && i < room; i++) tokens[i] = known[i];
      return known.size();
    }
  }
  std::vector<uint32_t> made(length + 1);
  size_t count = texts.ask(nullptr, bytes, length, made.data(), made.size());
  made.resize(count < made.size() ? count : made.size());
  for (size_t i = 0; i < made.size() && i < room; i++) tokens[i] = made[i];
  if (length <= texts.most_bytes) {
    std::lock_guard<std::mutex> lock(texts.mutex);
    if (texts.known.size() >= texts.most) texts.known.clear();
    texts.known.emplace(std::move(text), made);
  }
  return made.size();
}
