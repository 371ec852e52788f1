// Package record is the file format for the record of a planner: the options of the planner, then
// every event in order with the resulting actions. A record from production can be read, counted,
// and replayed on another planner, which must take the same actions (Replay). The planner's actions
// depend only on its options and events, so a difference means another version of the planner, or a
// defect.
//
//	{"penstock_planner_record":3,"options":{…},"network":{…}}
//	{"e":"GroupUp","v":{"At":1200,"Group":1,…}}
//	{"e":"Submit","v":{"At":5300,"Request":{"ID":1,"Prompt":4200,…}}}
//	{"e":"Fetch","v":{"At":9100,"Group":1,"Seen":0,…},"a":[{"kind":"assign","seq":1,"request":1,…}]}
//	⋮
//
// A record has one JSON object per line; times are nanoseconds since the planner began. An event
// has the field names of package dualpath. Machines, engines and requests are numbers: a record has
// no names, no prompts and no tokens.
//
// The package only encodes and decodes: it has no lock and starts no goroutine. Package
// server/planner decides where records are written, and how large they may grow.
package record
