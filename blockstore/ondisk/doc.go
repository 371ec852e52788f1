// Package ondisk encodes and decodes the records that a volume holds: superblock, catalogue area,
// segment header, slot header. It is not a store: it has no I/O, no state and no policy.
//
// A volume is a flat directory of fixed-size files. Numbers are little endian and sizes are bytes.
// Every record starts at a multiple of 4096, the unit of direct I/O.
//
//	superblock           8192 B   copy A at 0, copy B at 4096
//	catalogue            2 × (4096 + room)   area A, then area B; each: header, blob
//	segment-00000000     4096 B header, then slots of one size
//	segment-00000001     …
//
//	segment file   ┌───────────┬────────┬────────┬─ ─ ─┬────────┬ ─ ─ ─ ┐
//	               │ header    │ slot 0 │ slot 1 │     │ slot n │ unused
//	               └───────────┴────────┴────────┴─ ─ ─┴────────┴ ─ ─ ─ ┘
//	slot           ┌────────────────────────┬─────────┬─ ─ ─┬───────────┬──────────┐
//	               │ header, k × 4096 B     │ layer 0 │     │ layer L-1 │ zeroes   │
//	               └────────────────────────┴─────────┴─ ─ ─┴───────────┴──────────┘
//	                                         payload, layers unpadded     to 4096
//
// # The frame
//
// Every record starts with the same 24 bytes. Their layout is the same in every version of the format,
// so that each version recognises the records of every other version:
//
//	offset width
//	     0     8  magic       which record this is: PNSTKSUP, PNSTKCAT, PNSTKSEG, PNSTKSLT
//	     8     8  checksum    XXH3-64 of the record from offset 16 on: a record that is torn or
//	                          has a flipped bit is refused as a whole
//	    16     4  version     of the format: 1; 2 for the superblock of a shared volume; 3 for the
//	                          superblock of an encrypted volume, an encrypted catalogue and an
//	                          encrypted slot; 4 for the superblock of a volume with slots that need
//	                          the secrets of epochs, and a catalogue that has these secrets
//	    20     4  bytes       length of the record, a multiple of 4096; that of a slot header
//	                          grows with the number of layers
//
// # Superblock (4096 B)
//
//	24     8  sequence    the valid copy with the higher sequence counts; the other copy is
//	                      overwritten next
//	32    16  node        random at format time: volumes of two nodes are not mixed
//	48    16  volume      random at format time: identifies the volume of a segment
//	64     4  index       of this volume on the node: extents contain it, so --data may list
//	                      the volumes in any order
//	68     4  count       of volumes on the node: a missing volume is detected
//	72     4  boot        upper 16 bits of every generation assigned since the last start;
//	                      raised and synced before the first write of a start. In a shared
//	                      volume it is the owner's fencing number, which etcd assigns
//	76     4  zero
//	80     8  segment     file bytes of a full segment
//	88     8  catalogue   room for the blob in each catalogue area
//	96     4  membership  version of the two sets below: of all volumes, the sets with the
//	                      highest version count
//	100    4  zero
//	104   32  draining    a bit for each volume that is being drained
//	136   32  removed     a bit for each volume that was removed: its directory is refused
//	168     4  shared      1 in version 2, 0 in version 1, either in versions 3 and 4
//	172     4  keys        number K of periods below, 1 to 64 in versions 3 and 4, otherwise 0
//	176  56×K  periods     oldest first; each: 4 first boot counter whose generations the key
//	                       encrypts, 4 cipher (1: AES-256-GCM; 2: AES-256-GCM with a key that
//	                       depends on the secret of the slot's epoch too), 32 id of the key, 16
//	                       check value. Slots of lower boot counters than the first are plain
//	          zero to the end
//
// A shared volume has the files superblock-FENCE and catalogue-FENCE, in the same formats, for
// each fencing number FENCE (8 hexadecimal digits) whose files were not removed yet. The valid
// superblock with the highest fencing number counts. The file superblock marks the volume as
// shared; its other fields count only as long as there is no valid superblock-FENCE.
//
// # Catalogue area header (4096 B, the blob follows)
//
//	24     8  sequence    of all volumes, the valid area with the highest sequence counts
//	32     8  blob        length of the blob
//	40     8  blob sum    XXH3-64 of the blob: if it does not match, the area is not valid
//	48        zero to the end
//
// In version 3 the blob is encrypted: 32 id of the key, 32 salt, the encrypted blob, 16 tag. In version
// 4, encrypted too, these bytes come before the blob:
//
//	0     4  secrets     number S
//	4     4  erasures    number E
//	8  44×S  secrets     each: 4 namespace, 8 epoch, 32 secret. Of several secrets of one epoch the
//	                     last one is that of new slots
//	   52×E  erasures    each: 4 namespace, 8 epoch, 32 a bit for each volume whose catalogue may still
//	                     have secrets of the namespace's ended epochs, up to that epoch, 8 time at which
//	                     the first of them ended, in ms since 1970
//
// # Segment header (4096 B)
//
//	24    16  volume      id of the volume: a segment copied from another volume is refused
//	40     4  segment     number of this segment: a renamed file is detected
//	44     4  slots       number of slots
//	48     8  slot bytes  size of each slot: one size per segment, so the offset of a slot is
//	                      a multiplication
//	56     8  cut         generation when the segment was divided into slots of this size: a slot
//	                      header with an older generation is left from an earlier division
//	64        zero to the end
//
// # Slot header (4096 B for up to 496 layers)
//
//	 24     8  generation  of this content; if the index has another, the slot was reused
//	 32     8  extent      slot to which it was written: a misdirected write is detected
//	 40     4  namespace
//	 44     1  class       1 prefix, 2 transfer (dropped once delivered)
//	 45     1  group       layer group of the namespace's geometry
//	 46     2  zero
//	 48     8  epoch       version of the weights
//	 56    16  id          the block
//	 72    16  parent      previous block, zero at the root: a rebuild of the index needs it
//	 88    16  geometry    digest of the geometry: equal sizes may have another meaning
//	104     8  payload     bytes, without padding
//	112     4  layers      number of equal parts of the payload
//	116     4  depth       number of blocks before this one in its chain
//	120     8  born        generation of the slot to which the content was first written;
//	                       zero if the content was never moved
//	128  8×L   layer sums  XXH3-64 of each layer, made by the writer: a range of layers is
//	                       verified without reading the other layers
//	           zero to the end
//
// The header of an encrypted slot (version 3, at most 162 layers) has the same fields up to 128, in
// the clear, and then:
//
//	128    32  key         id of the key
//	160    32  salt        random; with the fields before 128 it determines the slot's own key
//	192  8×L   layer sums  encrypted
//	      16   tag         of the layer sums
//	     16×L  tags        of each layer: a range of layers is authenticated without the others
//	           zero to the end
//
// The payload is encrypted layer by layer and has the same length and place as a plain one.
package ondisk
