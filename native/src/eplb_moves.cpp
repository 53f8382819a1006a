// A few moves that help most, one layer after the other. eplb/reference.py says what it guarantees.
#include "eplb.h"

namespace {

constexpr int kExperts = 2;  // of the fullest set, the heaviest ones, that are tried
constexpr double kLeast = 1e-4;  // gain of a move on the way to a better place
constexpr int kSpares = 8;   // slots that can be given up, the ones that do least harm
constexpr int kTargets = 4;  // exchanges; they are looked for on as many of the emptiest ranks, or on
constexpr int kSmall = 4;    // all when the fullest set has no more ranks than this

struct Move {
  double score;  // after it; balancedness
  double gain;   // of balancedness per expert brought
  int expert, rank, slot;           // bring `expert` here
  int expert2, rank2, slot2;        // and this one there (-1: a single move)
};

struct Spare {
  double harm;  // the load that its rank, or the other copies' ranks, would have without it
  int rank, slot, expert;
};

struct Swap {
  double level;  // of the fuller of the two sets afterwards, were the rank outside alone
  int at, with;  // rank * S + slot
};

struct Improver {
  int G = 0, S = 0, E = 0, min_copies = 1;
  const double* w = nullptr;
  const uint8_t* alive = nullptr;
  const int32_t* domain = nullptr;
  int32_t* ids = nullptr;
  Hosts hosts;
  Flows base, trial;
  std::vector<int> index_of, expert_j;  // expert -> J, J -> expert
  std::vector<char> in_top;
  std::vector<int> donors, targets, alone_rank, alone_domain;
  std::vector<Spare> spares;
  std::vector<Swap> swaps;
  std::vector<int> replaced;
  std::vector<int> ranks_in;
  int most_rank = 0, most_domain = 0;  // experts that a rank, a domain may have alone
  double mean = 0.0;
  int live = 0;

  // mean / (64-norm of the loads): like balancedness, but the second fullest rank counts a little too.
  double score(const std::vector<double>& load) const {
    double total = 0.0;
    for (int g = 0; g < G; ++g) {
      if (!alive[g]) continue;
      double x = load[g] / mean;
      for (int i = 0; i < 6; ++i) x *= x;
      total += x;
    }
    total /= live;
    for (int i = 0; i < 6; ++i) total = std::sqrt(total);
    return 1.0 / total;
  }

  void solve() {
    hosts.build(ids, alive, G, S, E);
    base.reset(G);
    index_of.assign(E, -1);
    expert_j.clear();
    for (int e = 0; e < E; ++e) {
      const int begin = hosts.begin[e], count = hosts.begin[e + 1] - begin;
      for (int m = 0; m < count; ++m) base.load[hosts.slot[begin + m] / S] += w[e] / count;
      if (count == 1) continue;
      for (int m = 0; m < count; ++m) base.host.push_back(hosts.slot[begin + m] / S), base.flow.push_back(w[e] / count);
      index_of[e] = static_cast<int>(expert_j.size());
      expert_j.push_back(e);
      base.j_begin.push_back(static_cast<int>(base.host.size()));
    }
    base.solve();
  }

  int num_hosts(int e) const { return hosts.begin[e + 1] - hosts.begin[e]; }
  int host(int e, int m) const { return hosts.slot[hosts.begin[e] + m] / S; }

  // The domain that all hosts of e but `without` (plus `with`) are in, or -1.
  int only_domain(int e, int without, int with) const {
    int only = with < 0 ? -2 : domain[with];
    for (int m = 0; m < num_hosts(e); ++m) {
      const int g = host(e, m);
      if (g == without) continue;
      if (only == -2) only = domain[g];
      else if (only != domain[g]) return -1;
    }
    return only;
  }

  void count_alone() {
    alone_rank.assign(G, 0), alone_domain.assign(G, 0);
    for (int e = 0; e < E; ++e) {
      if (num_hosts(e) == 1) ++alone_rank[host(e, 0)];
      const int d = only_domain(e, -1, -1);
      if (d >= 0) ++alone_domain[d];
    }
    // One more per rank than in the most covering placement is always allowed: heavy experts may need a third copy.
    const int allowed = (std::max(0, 2 * E - live * S) + live - 1) / live + 1;
    std::vector<int>& size = ranks_in;
    size.assign(G, 0);
    for (int g = 0; g < G; ++g) size[domain[g]] += alive[g] != 0;
    most_rank = std::max(allowed, *std::max_element(alone_rank.begin(), alone_rank.end()));
    most_domain = std::max(allowed * *std::max_element(size.begin(), size.end()),
                           *std::max_element(alone_domain.begin(), alone_domain.end()));
  }

  // Whether no rank and no domain would have more experts alone than is allowed.
  bool keeps_coverage(int e, int h, int evicted) {
    bool keeps = true;
    int rank_of = -1, domain_of = -1, rank_less = -1, domain_less = -1;
    if (evicted >= 0) {
      if (num_hosts(evicted) == 2) rank_of = host(evicted, 0) == h ? host(evicted, 1) : host(evicted, 0);
      domain_of = only_domain(evicted, h, -1);
      if (domain_of >= 0 && only_domain(evicted, -1, -1) >= 0) domain_of = -1;  // it was so before
    }
    if (num_hosts(e) == 1) rank_less = host(e, 0);
    domain_less = only_domain(e, -1, -1);
    if (domain_less >= 0 && domain_less == domain[h]) domain_less = -1;
    if (rank_of >= 0 && rank_of != rank_less) keeps = alone_rank[rank_of] < most_rank;
    if (domain_of >= 0 && domain_of != domain_less) keeps = keeps && alone_domain[domain_of] < most_domain;
    return keeps;
  }

  void copy_base() {
    trial.num_ranks = G;
    trial.j_begin = base.j_begin, trial.host = base.host, trial.flow = base.flow, trial.load = base.load;
  }

  void trial_add(int e, int h) {
    const int j = index_of[e];
    if (j < 0) {
      trial.host.push_back(host(e, 0)), trial.flow.push_back(w[e]);
      trial.host.push_back(h), trial.flow.push_back(0.0);
      trial.j_begin.push_back(static_cast<int>(trial.host.size()));
      return;
    }
    const int at = trial.j_begin[j + 1];
    trial.host.insert(trial.host.begin() + at, h), trial.flow.insert(trial.flow.begin() + at, 0.0);
    for (size_t k = j + 1; k < trial.j_begin.size(); ++k) ++trial.j_begin[k];
  }

  void trial_evict(int f, int h) {
    const int j = index_of[f];
    int at = -1, to = -1;
    for (int c = trial.j_begin[j]; c < trial.j_begin[j + 1]; ++c) {
      if (trial.host[c] == h) at = c;
      else if (to < 0 || trial.load[trial.host[c]] < trial.load[trial.host[to]]) to = c;
    }
    trial.flow[to] += trial.flow[at];
    trial.load[trial.host[to]] += trial.flow[at];
    trial.load[h] -= trial.flow[at];
    trial.host.erase(trial.host.begin() + at), trial.flow.erase(trial.flow.begin() + at);
    for (size_t k = j + 1; k < trial.j_begin.size(); ++k) --trial.j_begin[k];
  }

  void consider(Move& best, double before, int loads, Move move) {
    trial.solve();
    move.score = score(trial.load);
    move.gain = (move.score - before) / loads;
    if (move.gain > best.gain) best = move;
  }

  // The ranks that share the greatest load, and those outside by rising load.
  void find_sets() {
    int top = 0;
    for (int g = 1; g < G; ++g)
      if (alive[g] && (!alive[top] || base.load[g] > base.load[top])) top = g;
    base.open.assign(G, 1);
    base.reach(top, base.tolerance());
    in_top.assign(G, 0);
    for (int g : base.reached) in_top[g] = 1;
    targets.clear();
    for (int g = 0; g < G; ++g)
      if (alive[g] && !in_top[g]) targets.push_back(g);
    std::sort(targets.begin(), targets.end(),
              [&](int a, int b) { return base.load[a] != base.load[b] ? base.load[a] < base.load[b] : a < b; });
    donors.clear();
    for (int e = 0; e < E; ++e)
      for (int m = 0; m < num_hosts(e); ++m)
        if (in_top[host(e, m)]) {
          donors.push_back(e);
          break;
        }
    std::sort(donors.begin(), donors.end(), [&](int a, int b) { return w[a] != w[b] ? w[a] > w[b] : a < b; });
  }

  // The slots outside the fullest set that can be given up, the least harm first.
  void find_spares() {
    spares.clear();
    for (int h = 0; h < G; ++h) {
      if (!alive[h] || in_top[h]) continue;
      for (int s = 0; s < S; ++s) {
        int f = ids[h * S + s];
        for (int t = 0; t < S && f >= 0; ++t)
          if (t != s && ids[h * S + t] == f) f = -1;  // twice on this rank: as good as unused
        if (f < 0) {
          spares.push_back({base.load[h], h, s, -1});
          continue;
        }
        const int count = num_hosts(f);
        if (count <= std::max(1, min_copies)) continue;
        double part = 0.0, others = 0.0;
        for (int c = base.j_begin[index_of[f]]; c < base.j_begin[index_of[f] + 1]; ++c) {
          if (base.host[c] == h) part = base.flow[c];
          else others += base.load[base.host[c]];
        }
        spares.push_back({std::max(base.load[h] - part, (others + part) / (count - 1)), h, s, f});
      }
    }
    std::sort(spares.begin(), spares.end(), [&](const Spare& a, const Spare& b) {
      return a.harm != b.harm ? a.harm < b.harm : a.rank != b.rank ? a.rank < b.rank : a.slot < b.slot;
    });
  }

  void try_copies(Move& best, double before, bool keep) {
    find_spares();
    for (size_t i = 0; i < spares.size() && static_cast<int>(i) < kSpares; ++i) {
      const int h = spares[i].rank, s = spares[i].slot, f = spares[i].expert;
      int tried = 0;
      for (int e : donors) {
        if (tried == kExperts) break;
        bool here = false;
        for (int m = 0; m < num_hosts(e); ++m) here = here || host(e, m) == h;
        if (here) continue;
        if (keep && !keeps_coverage(e, h, f)) continue;
        ++tried;
        copy_base();
        trial_add(e, h);
        if (f >= 0) trial_evict(f, h);
        consider(best, before, 1, Move{0, 0, e, h, s, -1, -1, -1});
      }
    }
  }

  // Exchange of two experts that have one copy each. Of every rank outside the pair that seems best, were its rank alone; of
  // those pairs the best few in earnest.
  void try_swaps(Move& best, double before) {
    const int size = static_cast<int>(base.reached.size());
    const size_t limit = size <= kSmall ? targets.size() : std::min<size_t>(targets.size(), kTargets);
    const double top = base.load[base.reached[0]];
    swaps.clear();
    for (size_t i = 0; i < limit; ++i) {
      const int h = targets[i];
      Swap found{top, -1, -1};
      for (int g : base.reached)
        for (int s = 0; s < S; ++s) {
          const int a = ids[g * S + s];
          if (a < 0 || num_hosts(a) != 1) continue;
          for (int t = 0; t < S; ++t) {
            const int b = ids[h * S + t];
            if (b < 0 || w[b] >= w[a] || num_hosts(b) != 1) continue;
            const double less = w[a] - w[b], level = std::max(top - less / size, base.load[h] + less);
            if (level < found.level) found = {level, g * S + s, h * S + t};
          }
        }
      if (found.at >= 0) swaps.push_back(found);
    }
    std::sort(swaps.begin(), swaps.end(),
              [](const Swap& a, const Swap& b) { return a.level != b.level ? a.level < b.level : a.with < b.with; });
    for (size_t i = 0; i < swaps.size() && static_cast<int>(i) < kTargets; ++i) {
      const int at = swaps[i].at, with = swaps[i].with, a = ids[at], b = ids[with];
      copy_base();
      trial.load[at / S] += w[b] - w[a];
      trial.load[with / S] += w[a] - w[b];
      consider(best, before, 2, Move{0, 0, a, with / S, with % S, b, at / S, at % S});
    }
  }

  // Takes the best move again and again, however small its gain, for often only several together help; then goes back to
  // where the gain per expert brought was best worth it. At most `max_loads` experts are brought, each into out as (rank,
  // slot, expert); returns how many and sets `gain`.
  int improve(int max_loads, double min_gain, bool keep, int32_t* out, double* gain) {
    mean = 0.0, live = 0, *gain = 0.0;
    for (int e = 0; e < E; ++e) mean += w[e];
    for (int g = 0; g < G; ++g) live += alive[g];
    mean /= live;
    if (!(mean > 0)) return 0;
    int done = 0, kept = 0;
    double first = 0.0;
    replaced.clear();
    while (done < max_loads) {
      solve();
      const double before = score(base.load);
      if (done == 0) first = before;
      if (1.0 - before < min_gain) break;
      count_alone();
      find_sets();
      Move best{before, kLeast, -1, -1, -1, -1, -1, -1};
      try_copies(best, before, keep);
      if (max_loads - done >= 2) try_swaps(best, before);
      if (best.expert < 0) break;
      take(best.rank, best.slot, best.expert, out, done++);
      if (best.expert2 >= 0) take(best.rank2, best.slot2, best.expert2, out, done++);
      // The longest way whose every expert brought is worth min_gain on average.
      if (best.score - first >= min_gain * done) kept = done, *gain = best.score - first;
    }
    for (int i = done - 1; i >= kept; --i) ids[out[3 * i] * S + out[3 * i + 1]] = replaced[i];
    return kept;
  }

  void take(int g, int s, int e, int32_t* out, int at) {
    out[3 * at] = g, out[3 * at + 1] = s, out[3 * at + 2] = e;
    replaced.push_back(ids[g * S + s]);
    ids[g * S + s] = e;
  }
};

}  // namespace

// Changes ids [L, G, S] in place. moves int32 [L, max_loads, 3] (rank, slot, expert), gains double [L], counts int64 [L]. domain int32 [G] with 0 <= label < G.
NATIVE_API void eplb_improve(int32_t* ids, const double* load, const uint8_t* alive, const int32_t* domain, int64_t min_copies,
                             int64_t max_loads, double min_gain, int64_t keep_coverage, int32_t* moves, double* gains,
                             int64_t* counts, int64_t L, int64_t G, int64_t S, int64_t E) {
  Improver improver;
  improver.G = static_cast<int>(G), improver.S = static_cast<int>(S), improver.E = static_cast<int>(E);
  improver.alive = alive, improver.domain = domain, improver.min_copies = static_cast<int>(min_copies);
  for (int64_t l = 0; l < L; ++l) {
    improver.w = load + l * E, improver.ids = ids + l * G * S;
    counts[l] = improver.improve(static_cast<int>(max_loads), min_gain, keep_coverage != 0, moves + l * max_loads * 3,
                                 gains + l);
  }
}
