-- What queries over time begin with, behind the window: the window cut into equal buckets.
--
-- grid    from_us, bucket_us: where the first bucket begins, and how long each is
-- bucket  bucket, at_unix_us, bucket_s: one row each, so that idle time is zeros, not holes
grid AS (
  SELECT from_us, to_us, greatest(1, (to_us - from_us + $points - 1) // $points) AS bucket_us
  FROM bounds
), bucket AS (
  SELECT b AS bucket, from_us + b * bucket_us AS at_unix_us,
         (least(from_us + (b + 1) * bucket_us, to_us) - from_us - b * bucket_us) / 1e6 AS bucket_s
  FROM grid, unnest(range(greatest(0, (to_us - from_us + bucket_us - 1) // bucket_us))) AS t(b)
)
