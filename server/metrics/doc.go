// Package metrics has the metrics of a storage node. The struct Node has a field for each metric
// that code increments. At each scrape, collectors that other packages register read the counts of
// other parts (devices, arena, index, data plane). docs/metrics.md documents every metric, and a
// test compares the page with the registry.
//
// Rules: names are penstock_<subsystem>_<what>_<unit>[_total], in base units. A counter of
// successes or hits accompanies the counter of attempts. No gauge is a ratio, because ratios cannot
// be summed over nodes. Hits are also counted in tokens, the unit of engine users. Labels are
// namespace, reason, volume and direction, never a key or a session.
package metrics
