// A whole step of a Llama-family model in one call: see abi.h for what goes in and out.
//
// Every member of the team runs `Step::member`; a barrier stands wherever one needs what another has written.
#include <stdlib.h>
#include <string.h>

#include <new>

#include "abi.h"
#include "attention.h"
#include "choose.h"
#include "linear.h"
#include "rms_norm.h"
#include "rope.h"
#include "team.h"
#include "watch.h"

namespace baton {
namespace {

// Up to here every member prepares all rows' activations for itself: less work than a barrier.
constexpr int SOLO_ROWS = 4;
// Rows of logits computed before tokens are chosen from them.
constexpr int HEAD_ROWS = 96;

// Hands out 64-byte aligned pieces of the caller's memory; from null it only measures.
class Arena {
 public:
  explicit Arena(void *base) : base_((char *)base) {}
  template <typename T>
  T *take(size_t count) {
    T *piece = base_ ? (T *)(base_ + used_) : nullptr;
    used_ += ceil_div(count * sizeof(T), 64) * 64;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char *base_;
  size_t used_ = 0;
};

struct AttentionItem {
  int32_t part, row;  // rows of a part are its tokens times the query heads of a KV head
};

struct MemberRoom {
  AttentionScratch *attention;
  bf16 *normed;
  Quantised quantised;
  DrawRoom draw;
};

int widest(const BatonModel &m) {
  const int attended = m.heads * m.head_dim;
  return std::max({m.hidden, m.intermediate, attended});
}

int qkv_width(const BatonModel &m) { return (int)ceil_div((m.heads + 2 * m.kv_heads) * m.head_dim, BATON_PANEL) * BATON_PANEL; }
int head_width(const BatonModel &m) { return (int)ceil_div(m.vocab, BATON_PANEL) * BATON_PANEL; }

Quantised take_quantised(Arena &arena, long rows, long width) {
  Quantised q;
  q.values = arena.take<int8_t>(QuantisedRoom::values_bytes(rows, width));
  q.scales = (float *)arena.take<char>(QuantisedRoom::groups_bytes(rows, width));
  q.sums = (int32_t *)arena.take<char>(QuantisedRoom::groups_bytes(rows, width));
  return q;
}

struct Workspace {
  float *states;
  bf16 *normed, *qkv, *attended, *active;
  Quantised quantised;
  float *angles;
  AttentionItem *items;
  Seen *seen;  // [members][HEAD_ROWS]
  std::atomic<int32_t> *taken;  // [layers + 1]
  std::vector<MemberRoom> members;
  size_t bytes;

  Workspace(const BatonModel &m, long tokens, long wanted, int count, void *base) {
    Arena arena(base);
    const long rows = std::max(tokens, wanted), group = m.heads / m.kv_heads;
    states = arena.take<float>(tokens * m.hidden);
    normed = arena.take<bf16>(rows * m.hidden);
    qkv = arena.take<bf16>(tokens * qkv_width(m));
    attended = arena.take<bf16>(tokens * m.heads * m.head_dim);
    active = arena.take<bf16>(tokens * m.intermediate);
    quantised = take_quantised(arena, rows, widest(m));
    angles = arena.take<float>(tokens * m.head_dim);
    items = arena.take<AttentionItem>(tokens * ceil_div(group, ATTENTION_ROWS));
    seen = arena.take<Seen>((size_t)count * HEAD_ROWS);
    taken = arena.take<std::atomic<int32_t>>(m.layers + 1);
    for (int member = 0; member < count; member++) {
      MemberRoom room;
      room.attention = arena.take<AttentionScratch>(1);
      room.normed = arena.take<bf16>((size_t)SOLO_ROWS * m.hidden);
      room.quantised = take_quantised(arena, SOLO_ROWS, widest(m));
      room.draw.weights = arena.take<float>(m.vocab + 16);
      room.draw.likely = arena.take<float>(m.vocab + 16);
      members.push_back(room);
    }
    bytes = arena.used();
  }
};

struct Step {
  Team &team;
  const BatonModel &m;
  const BatonStep &s;
  Workspace room;
  int items = 0;
  double marked = 0;
  bool whole_parts = true;  // every part's rows are one item

  Step(Team &team, const BatonModel &m, const BatonStep &s)
      : team(team), m(m), s(s), room(m, s.tokens, s.wanted, team.size(), s.workspace) {
    for (int layer = 0; layer <= m.layers; layer++) new (&room.taken[layer]) std::atomic<int32_t>(0);
    list_items();
  }

  // Ends a phase, as member 0 sees it.
  void mark(int me, BatonPhase phase) {
    if (s.seconds == nullptr || me != 0) return;
    const double now = seconds_now();
    s.seconds[phase] += now - marked;
    marked = now;
  }

  int group() const { return m.heads / m.kv_heads; }

  void list_items() {
    for (int part = 0; part < s.parts; part++) {
      const int rows = s.part[part].count * group();
      whole_parts &= rows <= ATTENTION_ROWS;
      for (int row = 0; row < rows; row += ATTENTION_ROWS) room.items[items++] = {part, row};
    }
  }

  void member(int me) {
    if (me == 0) marked = seconds_now();
    const Range mine(s.tokens, me, team.size());
    embed(mine);
    find_angles(mine);
    team.barrier();
    mark(me, BATON_EMBED);
    for (int index = 0; index < s.layers; index++) {
      const BatonLayer &layer = m.layer[index];
      const Activations x = normed(layer.attention_norm, layer.qkv, me);
      multiply(layer.qkv, x, s.tokens, {Target::STORE_BF16, room.qkv, qkv_width(m)}, me, team.size());
      team.barrier();
      mark(me, BATON_QKV);
      attention(layer, room.qkv, room.attended, index, me);
      team.barrier();
      mark(me, BATON_ATTENTION);
      const Activations seen = prepared(room.attended, layer.output, me);
      multiply(layer.output, seen, s.tokens, {Target::ADD_F32, room.states, m.hidden}, me, team.size());
      team.barrier();
      mark(me, BATON_OUTPUT);
      const Activations h = normed(layer.ffn_norm, layer.gate_up, me);
      multiply(layer.gate_up, h, s.tokens, {Target::SILU_BF16, room.active, m.intermediate}, me, team.size());
      team.barrier();
      mark(me, BATON_GATE_UP);
      const Activations active = prepared(room.active, layer.down, me);
      multiply(layer.down, active, s.tokens, {Target::ADD_F32, room.states, m.hidden}, me, team.size());
      team.barrier();
      mark(me, BATON_DOWN);
    }
    head(me);
    team.barrier();
    mark(me, BATON_HEAD);
  }

  void embed(const Range &mine) {
    for (long token = mine.begin; token < mine.end; token++) {
      const bf16 *from = m.embedding + (size_t)s.ids[token] * m.hidden;
      float *to = room.states + (size_t)token * m.hidden;
      for (int i = 0; i < m.hidden; i += 16) _mm512_storeu_ps(to + i, load_bf16(from + i));
    }
  }

  // Every member looks at all parts, and computes the angles of its own tokens.
  void find_angles(const Range &mine) {
    for (int index = 0; index < s.parts; index++) {
      const BatonPart &part = s.part[index];
      const long begin = std::max<long>(mine.begin, part.first), end = std::min<long>(mine.end, part.first + part.count);
      for (long token = begin; token < end; token++)
        angles((float)(part.start + (token - part.first)), m.rope_frequencies, m.rope_scale,
               room.angles + token * m.head_dim, m.head_dim / 2);
    }
  }

  // The normalised states, quantised as `matrix` wants them.
  Activations normed(const float *weight, const BatonMatrix &matrix, int me) {
    return ready(matrix, s.tokens, me, room.normed, [&](long row, bf16 *out) {
      rms_norm_row(room.states + row * m.hidden, weight, out, m.hidden, m.rms_eps);
    });
  }

  // Rows that all members may read, quantised as `matrix` wants them.
  Activations prepared(const bf16 *rows, const BatonMatrix &matrix, int me) {
    if (matrix.kind == BATON_BF16) return {rows, {}};
    const bool solo = s.tokens <= SOLO_ROWS;
    const Activations x{rows, solo ? room.members[me].quantised : room.quantised};
    const Range mine(s.tokens, solo ? 0 : me, solo ? 1 : team.size());
    quantise_rows(matrix, x, mine.begin, mine.end);
    if (!solo) team.barrier();
    return x;
  }

  template <typename Norm>
  Activations ready(const BatonMatrix &matrix, long rows, int me, bf16 *shared, Norm norm) {
    const bool solo = rows <= SOLO_ROWS;
    bf16 *out = solo ? room.members[me].normed : shared;
    const Activations x{out, solo ? room.members[me].quantised : room.quantised};
    const Range mine(rows, solo ? 0 : me, solo ? 1 : team.size());
    for (long row = mine.begin; row < mine.end; row++) norm(row, out + row * m.hidden);
    quantise_rows(matrix, x, mine.begin, mine.end);
    if (!solo) team.barrier();
    return x;
  }

  // Rotates a token's heads of one KV head, and stores its key and value.
  void rotate_and_store(bf16 *qkv, const BatonLayer &layer, const BatonPart &part, int token, int kv_head) {
    bf16 *row = qkv + (size_t)(part.first + token) * qkv_width(m);
    const float *table = room.angles + (size_t)(part.first + token) * m.head_dim;
    bf16 *key = row + (size_t)(m.heads + kv_head) * m.head_dim, *value = key + (size_t)m.kv_heads * m.head_dim;
    for (int head = kv_head * group(); head < (kv_head + 1) * group(); head++)
      rotate(row + (size_t)head * m.head_dim, table, m.head_dim / 2);
    rotate(key, table, m.head_dim / 2);
    const int position = part.start + token, at = position % BATON_BLOCK_TOKENS;
    const size_t place = place_of(s.blocks[part.table + position / BATON_BLOCK_TOKENS], kv_head, m);
    store_kv(key, value, layer.keys + place, layer.values + place, at, m.head_dim);
    // Behind its last token a block holds what a former owner left, or the one it was copied from.
    if (token == part.count - 1) clear_values(layer.values + place, at + 1, m.head_dim);
  }

  void attention(const BatonLayer &layer, bf16 *qkv, bf16 *out, int index, int me) {
    if (!whole_parts) {
      const Range mine(s.tokens, me, team.size());
      for (int p = 0; p < s.parts; p++) {
        const BatonPart &part = s.part[p];
        const long begin = std::max<long>(mine.begin - part.first, 0);
        const long end = std::min<long>(mine.end - part.first, part.count);
        for (long token = begin; token < end; token++)
          for (int head = 0; head < m.kv_heads; head++) rotate_and_store(qkv, layer, part, (int)token, head);
      }
      team.barrier();
    }
    // The last items look back furthest, so they go first.
    for (;;) {
      const int item = items * m.kv_heads - 1 - room.taken[index].fetch_add(1, std::memory_order_relaxed);
      if (item < 0) break;
      attend_item(layer, qkv, out, item, *room.members[me].attention);
    }
  }

  // What this member most likely attends to after item `number`.
  Upcoming upcoming(const BatonLayer &layer, int number) const {
    const int next = number - team.size();
    if (next < 0 || room.items[next / m.kv_heads].part == room.items[number / m.kv_heads].part) return {nullptr, nullptr, 0};
    const BatonPart &part = s.part[room.items[next / m.kv_heads].part];
    const int count = (int)ceil_div(part.start + part.count, BATON_BLOCK_TOKENS);
    return {layer.keys + place_of(0, next % m.kv_heads, m), s.blocks + part.table, count};
  }

  void attend_item(const BatonLayer &layer, bf16 *qkv, bf16 *out, int number, AttentionScratch &scratch) {
    const AttentionItem &item = room.items[number / m.kv_heads];
    const int kv_head = number % m.kv_heads;
    const BatonPart &part = s.part[item.part];
    if (whole_parts)
      for (int token = 0; token < part.count; token++) rotate_and_store(qkv, layer, part, token, kv_head);
    AttentionRows rows;
    rows.count = std::min(ATTENTION_ROWS, part.count * group() - item.row);
    for (int r = 0; r < rows.count; r++) {
      const int token = (item.row + r) / group(), head = kv_head * group() + (item.row + r) % group();
      const size_t at = (size_t)(part.first + token);
      rows.query[r] = qkv + at * qkv_width(m) + (size_t)head * m.head_dim;
      rows.out[r] = out + (at * m.heads + head) * m.head_dim;
      rows.seen[r] = part.start + token + 1;
    }
    const size_t stride = (size_t)m.kv_heads * BATON_BLOCK_TOKENS * m.head_dim, head = place_of(0, kv_head, m);
    attend(rows, layer.keys + head, layer.values + head, s.blocks + part.table, stride, m.head_dim,
           upcoming(layer, number), scratch);
  }

  void head(int me) {
    for (int first = 0; first < s.wanted; first += HEAD_ROWS) {
      const int rows = std::min(HEAD_ROWS, s.wanted - first);
      if (first) team.barrier();  // what was prepared for the rows before is still read
      const Activations x = ready(m.head, rows, me, room.normed, [&](long row, bf16 *out) {
        rms_norm_row(room.states + (size_t)s.rows[first + row] * m.hidden, m.norm, out, m.hidden, m.rms_eps);
      });
      float *logits = s.logits + (size_t)first * head_width(m);
      see_share(x, logits, rows, me);
      team.barrier();
      const Range mine(rows, me, team.size());
      for (long row = mine.begin; row < mine.end; row++) {
        Seen all;
        for (int member = 0; member < team.size(); member++) all.add(room.seen[member * HEAD_ROWS + row]);
        s.choice[first + row] = choose(all, logits + row * head_width(m), s.vocab, s.draw[first + row],
                                       room.members[me].draw);
      }
    }
  }

  // This member's columns of the logits, looked at a few panels at a time, while they are in the cache.
  void see_share(const Activations &x, float *logits, int rows, int me) {
    constexpr long PANELS = 32;
    const long panels = head_width(m) / BATON_PANEL;
    const Range mine(panels, me, team.size());
    Seen *seen = room.seen + (size_t)me * HEAD_ROWS;
    for (int row = 0; row < rows; row++) seen[row] = Seen();
    const Target target{Target::STORE_F32, logits, head_width(m)};
    for (long first = mine.begin; first < mine.end; first += PANELS) {
      const long end = std::min(first + PANELS, mine.end);
      for (long panel = first; panel < end; panel++) multiply_panel(m.head, x, panel, 0, rows, target);
      const long last = std::min<long>(end * BATON_PANEL, s.vocab);
      for (int row = 0; row < rows; row++)
        seen[row].add(see(logits + (size_t)row * head_width(m), first * BATON_PANEL, last));
    }
  }
};

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

int32_t baton_abi(void) { return BATON_ABI; }

void *baton_team_open(int32_t threads) {
  try {
    return new Team(threads);
  } catch (const std::exception &) {
    return nullptr;
  }
}

void baton_team_close(void *team) { delete static_cast<Team *>(team); }

uint64_t baton_workspace_bytes(const BatonModel *m, int32_t tokens, int32_t wanted, int32_t threads) {
  return Workspace(*m, tokens, wanted, threads, nullptr).bytes;
}

void baton_step(void *team, const BatonModel *m, const BatonStep *s) {
  Step step(*static_cast<Team *>(team), *m, *s);
  step.team.run([&](int me) { step.member(me); });
}

void baton_head(void *team, const BatonModel *m, const BatonStep *s) {
  Step step(*static_cast<Team *>(team), *m, *s);
  step.team.run([&](int me) { step.head(me); });
}

void baton_rms_norm(const float *x, const float *weight, uint16_t *out, int32_t rows, int32_t hidden, float eps) {
  for (long row = 0; row < rows; row++) rms_norm_row(x + row * hidden, weight, out + row * hidden, hidden, eps);
}

void baton_rope_store(uint16_t *qkv, const BatonModel *m, const BatonStep *s, int32_t layer) {
  Team alone(1);
  Step step(alone, *m, *s);
  step.find_angles(Range(s->tokens, 0, 1));
  for (int part = 0; part < s->parts; part++)
    for (int token = 0; token < s->part[part].count; token++)
      for (int head = 0; head < m->kv_heads; head++)
        step.rotate_and_store(qkv, m->layer[layer], s->part[part], token, head);
}

void baton_attention(void *team, uint16_t *qkv, uint16_t *out, const BatonModel *m, const BatonStep *s,
                     int32_t layer) {
  Step step(*static_cast<Team *>(team), *m, *s);
  step.team.run([&](int me) {
    step.find_angles(Range(s->tokens, me, step.team.size()));
    step.team.barrier();
    step.attention(m->layer[layer], qkv, out, layer, me);
  });
}

uint64_t baton_linear_workspace_bytes(const BatonMatrix *matrix, int32_t rows) {
  Arena arena(nullptr);
  take_quantised(arena, rows, matrix->in);
  return arena.used();
}

static void linear(void *opened, const BatonMatrix &matrix, const uint16_t *x, int32_t rows, void *workspace,
                   const Target &target) {
  Team &team = *static_cast<Team *>(opened);
  Arena arena(workspace);
  const Activations activations{x, take_quantised(arena, rows, matrix.in)};
  team.run([&](int me) {
    const Range mine(rows, me, team.size());
    quantise_rows(matrix, activations, mine.begin, mine.end);
    team.barrier();
    multiply(matrix, activations, rows, target, me, team.size());
  });
}

void baton_linear(void *team, const BatonMatrix *matrix, const uint16_t *x, float *out, int32_t rows,
                  void *workspace) {
  const int stride = (int)ceil_div(matrix->out, BATON_PANEL) * BATON_PANEL;
  linear(team, *matrix, x, rows, workspace, {Target::STORE_F32, out, stride});
}

void baton_silu_linear(void *team, const BatonMatrix *matrix, const uint16_t *x, uint16_t *out, int32_t rows,
                       void *workspace) {
  linear(team, *matrix, x, rows, workspace, {Target::SILU_BF16, out, matrix->out / 2});
}

void baton_choose(const float *logits, int32_t rows, int32_t stride, int32_t vocab, const BatonDraw *draws,
                  BatonChoice *choices, float *workspace) {
  const DrawRoom room{workspace, workspace + ceil_div(vocab, 16) * 16 + 16};
  for (long row = 0; row < rows; row++) {
    const float *its = logits + row * stride;
    choices[row] = choose(see(its, 0, vocab), its, vocab, draws[row], room);
  }
}
}
