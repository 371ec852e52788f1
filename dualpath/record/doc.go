// Package record is a planner's life as a file: the options it was made with, then
// every event in order with the actions that came of it. What was recorded in
// production can be read, counted, and given to another planner, which must decide
// the same (Replay): the planner is pure, so a difference is another version of it,
// or a defect.
//
//	{"penstock_planner_record":3,"options":{…},"network":{…}}
//	{"e":"GroupUp","v":{"At":1200,"Group":1,…}}
//	{"e":"Submit","v":{"At":5300,"Request":{"ID":1,"Prompt":4200,…}}}
//	{"e":"Fetch","v":{"At":9100,"Group":1,"Seen":0,…},"a":[{"kind":"assign","seq":1,"request":1,…}]}
//	⋮
//
// One JSON object a line; times are nanoseconds since the planner began. An event is
// written with the field names of package dualpath. Numbers stand for machines,
// engines and requests: no name, no prompt and no token is in a record.
//
// It is pure: bytes in and out. Who writes them where, and how much of it, is
// server/planner's. The package has no lock and starts no goroutine.
package record
